"""Learning-rate schedules against their closed forms and the papers' numbers; driven by epochs, not by a server's count."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpisgd.config import ConstantOptions, ExponentialOptions, LinearOptions, ScheduleOptions, StepOptions
from mpisgd.update.schedule import make


@pytest.mark.parametrize(
    ("options", "epochs", "factor"),
    [
        (ConstantOptions(), 0.0, 1.0),
        (ConstantOptions(), 1e6, 1.0),
        # [Zhang16 4.1]: CIFAR-10, divided by 10 after epochs 120 and 130 of 140
        (StepOptions(), 119.999, 1.0),
        (StepOptions(), 120.0, 0.1),
        (StepOptions(), 129.999, 0.1),
        (StepOptions(), 130.0, 0.01),
        # [Zhang16 4.1]: ImageNet, after epochs 15 and 25 of 30
        (StepOptions(epochs=(15.0, 25.0)), 20.0, 0.1),
        (StepOptions(epochs=(3.0,), factor=0.5), 7.0, 0.5),
        (StepOptions(epochs=()), 7.0, 1.0),
        (ExponentialOptions(), 0.0, 1.0),
        (ExponentialOptions(), 2.0, 0.94),
        (ExponentialOptions(), 5.0, 0.94**2.5),
        (ExponentialOptions(beta=0.5, every_epochs=1.0), 3.0, 0.125),
        # annealed linearly to 0 at the last epoch
        (LinearOptions(), 0.0, 1.0),
        (LinearOptions(), 35.0, 0.75),
        (LinearOptions(), 140.0, 0.0),
        (LinearOptions(), 150.0, 0.0),
        (LinearOptions(end=0.2), 70.0, 0.6),
        (LinearOptions(end=0.2), 140.0, 0.2),
        (ConstantOptions(warmup_epochs=4.0), 1.0, 0.25),
        (ConstantOptions(warmup_epochs=4.0), 5.0, 1.0),
        (ExponentialOptions(warmup_epochs=4.0), 2.0, 0.94 * 0.5),
        (LinearOptions(warmup_epochs=70.0), 35.0, 0.75 * 0.5),
        (StepOptions(warmup_epochs=5.0), 2.5, 0.5),
    ],
)
def test_closed_forms(options: ScheduleOptions, epochs: float, factor: float) -> None:
    assert make(options, total_epochs=140.0)(epochs) == pytest.approx(factor, abs=1e-12)


@pytest.mark.parametrize(
    ("epochs", "factor"), [(0.0, 1.0), (14.9, 1.0), (15.0, 1.0), (17.5, 0.75), (20.0, 0.5), (24.0, 0.1), (25.0, 0.0), (26.0, 0.0)]
)
def test_chens_mnist_anneals_the_last_10_of_25_epochs(epochs: float, factor: float) -> None:
    """[Chen16 A.1]; where a shorter run ends before annealing begins, the rate stays."""
    options = LinearOptions(start_epochs=15.0)
    assert make(options, total_epochs=25.0)(epochs) == pytest.approx(factor, abs=1e-12)
    assert make(options, total_epochs=5.0)(min(epochs, 5.0)) == 1.0


@pytest.mark.parametrize("updates", [1, 4, 7])
def test_warm_up_gives_k_updates_1_to_k_parts_of_the_rate(updates: int) -> None:
    """No update has a rate of 0: the first would do nothing."""
    samples, size = 32, 1000
    factor = make(ConstantOptions(warmup_epochs=updates * samples / size), 10.0, update_epochs=samples / size)
    rates = [factor(update * samples / size) for update in range(updates + 3)]
    assert rates == pytest.approx([min(1.0, (update + 1) / updates) for update in range(updates + 3)])


@given(t=st.integers(0, 10**6), wanted=st.integers(1, 200), mini_batches=st.integers(1, 10**5))
def test_exponential_is_chens_formula(t: int, wanted: int, mini_batches: int) -> None:
    """gamma0 beta^(t N / 2T): t updates of N mini-batches each, T mini-batches in an epoch [Chen16 A.2]."""
    epochs = t * wanted / mini_batches
    assert make(ExponentialOptions(beta=0.94), 1.0)(epochs) == pytest.approx(0.94 ** (t * wanted / (2 * mini_batches)))


@given(
    epochs=st.tuples(st.floats(0, 200), st.floats(0, 200)),
    options=st.sampled_from([StepOptions(), LinearOptions(), LinearOptions(100.0)]),
)
def test_a_rate_never_rises_after_warm_up(epochs: tuple[float, float], options: ScheduleOptions) -> None:
    factor = make(options, 140.0)
    assert 0.0 <= factor(max(epochs)) <= factor(min(epochs)) <= 1.0
