"""Habits of PyTorch programmers: freezing, tying, hooks, parametrizations, and steps of their own."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint

from tests.torch_law.law import Idiom


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))


def loss_of(model: nn.Module, batch: Any) -> Tensor:
    return functional.cross_entropy(model(batch[0]), batch[1])


# ------------------------------------------------------------------------------------------------------ freezing, modes


def frozen() -> nn.Module:
    model = net()
    model[0].requires_grad_(False)
    return model


class FrozenStatistics(nn.Module):
    """Batch norm that is kept in `eval` mode, as in fine-tuning."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head = nn.BatchNorm1d(8), nn.Linear(8, 2)
        self.norm.running_mean = torch.linspace(0.1, 0.9, 8)

    def train(self, mode: bool = True) -> FrozenStatistics:
        super().train(mode)
        self.norm.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(self.norm(x))
        return found


def in_eval_mode() -> nn.Module:
    """As libraries of pretrained models hand them out."""
    return nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.4), nn.Linear(8, 2)).eval()


def unfreezing() -> Any:
    calls = [0]

    def step(model: Any, batch: Any) -> Tensor:
        calls[0] += 1
        if calls[0] == 6:
            model[0].requires_grad_(True)
        return loss_of(model, batch)

    return step


# --------------------------------------------------------------------------------------------------------------- ties


class Tied(nn.Module):
    """An autoencoder of one matrix."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.enc, self.dec, self.head = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False), nn.Linear(8, 2)
        if how == "in forward":
            del self.dec
        if how == "same":
            self.dec.weight = self.enc.weight
        if how == "data":
            self.dec.weight.data = self.enc.weight.data
        if how == "transposed":
            self.dec.weight.data = self.enc.weight.data.t()
        if how == "rows":
            whole = torch.randn(9, 8)
            self.enc.weight.data, self.dec.weight.data = whole[:8], whole[1:]
        if how == "buffer":
            self.register_buffer("seen", self.enc.weight.data)

    def forward(self, x: Tensor) -> Tensor:
        decoder = self.enc.weight.t() if self.how == "in forward" else self.dec.weight
        found: Tensor = self.head(functional.linear(self.enc(x).tanh(), decoder))
        return found


def called_twice() -> nn.Module:
    layer = nn.Linear(8, 8)
    return nn.Sequential(layer, nn.Tanh(), layer, nn.Linear(8, 2))


# -------------------------------------------------------------------------------------------------- hooks, constraints


def hooked() -> nn.Module:
    model = net()
    model[0].weight.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
    model[0].register_forward_hook(lambda module, given, output: 2 * output)
    model[2].register_full_backward_hook(lambda module, into, out: None)
    return model


def weight_normed() -> nn.Module:
    return nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)), nn.Linear(8, 2))


class Positive(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return functional.softplus(weight)


def parametrized() -> nn.Module:
    model = net()
    nn.utils.parametrize.register_parametrization(model[0], "weight", Positive())
    return model


def orthogonal() -> nn.Module:
    return nn.Sequential(nn.utils.parametrizations.orthogonal(nn.Linear(8, 8)), nn.Linear(8, 2))


class Clamped(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.layer = how, nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            if self.how == "weight":
                self.layer.weight.clamp_(min=0)
            else:
                self.layer.weight.data.clamp_(min=0)
        found: Tensor = self.layer(x)
        return found


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.2), nn.ReLU()), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(checkpoint(self.body, x, use_reentrant=False))
        return found


class StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        return x.sign()

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient


class Binary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(8, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(StraightThrough.apply(self.body(x)))  # type: ignore[no-untyped-call]
        return found


class Unreadable:
    """Is pickled by its name."""


class Counting(nn.Module):
    """Keeps what is no tensor in its state."""

    def __init__(self, extra: Any = 3) -> None:
        super().__init__()
        self.head, self.extra = nn.Linear(8, 2), extra

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(x)
        return found

    def get_extra_state(self) -> Any:
        return {"version": self.extra}

    def set_extra_state(self, state: Any) -> None:
        self.extra = state["version"]


# --------------------------------------------------------------------------------------------------------------- steps


def adversarial(model: nn.Module, batch: Any) -> Tensor:
    """[FGSM]: samples are moved against their gradient, which is then cleared."""
    x, y = batch
    if not model.training:
        return loss_of(model, batch)
    x = x.clone().requires_grad_()
    functional.cross_entropy(model(x), y).backward()
    moved = (x + 0.1 * x.grad.sign()).detach()
    model.zero_grad()
    return functional.cross_entropy(model(moved), y)


def gradient_penalty(model: nn.Module, batch: Any) -> Tensor:
    x = batch[0].clone().requires_grad_()
    with torch.enable_grad():
        loss = functional.cross_entropy(model(x), batch[1])
        (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
    return loss + gradient.square().sum()


def several_losses(model: nn.Module, batch: Any) -> dict[str, Tensor]:
    output = model(batch[0])
    entropy, size = functional.cross_entropy(output, batch[1]), output.square().mean()
    return {"loss": entropy + 0.1 * size, "entropy": entropy, "size": size}


def mixed_up(model: nn.Module, batch: Any) -> Tensor:
    """[mixup] with draws of torch's generator."""
    x, y = batch
    order, share = torch.randperm(len(x)), torch.rand(())
    output = model(share * x + (1 - share) * x[order])
    return share * functional.cross_entropy(output, y) + (1 - share) * functional.cross_entropy(output, y[order])


def leaving_gradients(model: nn.Module, batch: Any) -> Tensor:
    loss = loss_of(model, batch)
    if model.training:
        loss.backward(retain_graph=True)  # type: ignore[no-untyped-call]
    return loss


def clipping_weights(model: nn.Module, batch: Any) -> Tensor:
    with torch.no_grad():
        for each in model.parameters():
            each.clamp_(-0.05, 0.05)
    return loss_of(model, batch)


def loading(model: nn.Module, batch: Any) -> Tensor:
    if model.training:
        model.load_state_dict({name: 0.9 * value for name, value in model.state_dict().items()})
    return loss_of(model, batch)


class Followed(nn.Module):
    """A student, and a teacher that follows it [mean teacher], in whatever way its parameters are not trained."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.student = how, net()
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.student(x)
        return found


def following(model: Any, batch: Any) -> Tensor:
    with torch.no_grad():
        target = model.teacher(batch[0]).softmax(dim=1)
        if model.training:
            for slow, fast in zip(model.teacher.parameters(), model.student.parameters(), strict=True):
                if model.how == "data":
                    slow.data.mul_(0.9).add_(fast.data, alpha=0.1)
                else:
                    slow.lerp_(fast, 0.1)
    output = model(batch[0])
    return functional.cross_entropy(output, batch[1]) + functional.cross_entropy(output, target)


class Scaled(nn.Module):
    """A temperature, without a dimension, and a parameter without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.heat, self.none = nn.Linear(8, 2), nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.empty(0))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layer(x) * self.heat.exp()
        return found


class Shallow(nn.Module):
    """[stochastic depth]: chance leaves layers out."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList(nn.Linear(8, 8) for _ in range(3)), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if not self.training or torch.rand(()) < 0.6:
                x = x + layer(x).tanh()
        found: Tensor = self.head(x)
        return found


class Experts(nn.Module):
    """Each mini-batch goes to one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(8, 6), nn.ModuleList(nn.Linear(8, 2) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        shares = self.gate(x).softmax(dim=1)
        best = int(shares.mean(dim=0).argmax())
        found: Tensor = self.experts[best](x) * shares[:, best : best + 1]
        return found


class Aside(nn.Module):
    """A head whose output counts nothing, is detached, or is asked for in evaluations alone."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.head, self.aside = how, nn.Linear(8, 2), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(x)
        if self.how == "zero":
            return found + 0.0 * self.aside(x)
        if self.how == "detached":
            return found + self.aside(x).detach()
        return found if self.training else found + self.aside(x)


def doubly(model: nn.Module, batch: Any) -> Tensor:
    """The norm of the gradient is part of the loss."""
    with torch.enable_grad():
        loss = loss_of(model, batch)
        gradients = torch.autograd.grad(loss, [each for each in model.parameters() if each.requires_grad], create_graph=True)
    return loss + torch.stack([each.square().sum() for each in gradients]).sum()


def pruned() -> nn.Module:
    model = net()
    prune.l1_unstructured(model[0], "weight", 0.5)  # type: ignore[no-untyped-call]
    return model


def compiled() -> nn.Module:
    model = net()
    model.compile(backend="eager")
    return model


def lazy() -> nn.Module:
    return nn.Sequential(nn.LazyLinear(8), nn.ReLU(), nn.LazyLinear(2))


def lazy_run_once() -> nn.Module:
    model = lazy()
    model(torch.zeros(1, 8))
    return model


def copied() -> nn.Module:
    layer = nn.Linear(8, 8)
    return nn.Sequential(*(copy.deepcopy(layer) for _ in range(2)), nn.Linear(8, 2))


ZOO: dict[str, Idiom] = {
    "requires_grad_(False)": Idiom(frozen),
    "batch norm kept in eval mode": Idiom(FrozenStatistics),
    "a factory that returns model.eval()": Idiom(in_eval_mode),
    "unfreezing in training": Idiom(
        frozen,
        step=unfreezing(),
        refused="requires_grad of 0.weight became True in training",
        instead="train with the part frozen; then begin a run with init_from, of a factory that leaves it trainable",
    ),
    "one Parameter under two names": Idiom(lambda: Tied("same")),
    "tied in forward": Idiom(lambda: Tied("in forward")),
    "tied by .data": Idiom(
        lambda: Tied("data"), refused="enc.weight and dec.weight share memory", instead="dec.weight = enc.weight"
    ),
    "tied by .data, transposed": Idiom(
        lambda: Tied("transposed"), refused="enc.weight and dec.weight share memory", instead="enc.weight.t() in forward"
    ),
    "overlapping rows": Idiom(
        lambda: Tied("rows"), refused="enc.weight and dec.weight share memory", instead="one parameter, sliced in forward"
    ),
    "a buffer that is a view of a weight": Idiom(
        lambda: Tied("buffer"), refused="enc.weight and seen share memory", instead="the weight itself, in forward"
    ),
    "one module called twice": Idiom(called_twice),
    "deepcopy of a layer": Idiom(copied),
    "hooks": Idiom(hooked),
    "weight_norm": Idiom(weight_normed),
    "parametrize": Idiom(parametrized),
    "orthogonal": Idiom(orthogonal),
    "weights clamped in forward": Idiom(
        lambda: Clamped("weight"), refused="layer.weight was changed in place", instead="torch.nn.utils.parametrize"
    ),
    "weights clamped by .data": Idiom(
        lambda: Clamped("data"), refused="model: weights were changed in place", instead="torch.nn.utils.parametrize"
    ),
    "activations checkpointed": Idiom(Checkpointed),
    "autograd.Function": Idiom(Binary),
    "a teacher that follows": Idiom(lambda: Followed("lerp"), step=following),
    "a teacher that follows by .data": Idiom(lambda: Followed("data"), step=following),
    "a temperature, and a parameter of no elements": Idiom(Scaled),
    "stochastic depth": Idiom(Shallow),
    "a mixture of experts": Idiom(Experts),
    "a head times zero": Idiom(lambda: Aside("zero")),
    "a detached head": Idiom(lambda: Aside("detached")),
    "a head of evaluations alone": Idiom(lambda: Aside("eval")),
    "a gradient of gradients": Idiom(net, step=doubly),
    "prune": Idiom(pruned),
    "torch.compile(model)": Idiom(lambda: torch.compile(net(), backend="eager")),  # type: ignore[arg-type, return-value]
    "model.compile()": Idiom(compiled),
    "torch.jit.script": Idiom(lambda: torch.jit.script(net())),
    "DataParallel": Idiom(lambda: nn.DataParallel(net())),
    "AveragedModel": Idiom(lambda: torch.optim.swa_utils.AveragedModel(net())),
    "double precision": Idiom(
        lambda: net().double(), refused="parameter 0.weight is torch.float64, expected torch.float32", instead="model.float()"
    ),
    "half precision": Idiom(
        lambda: net().half(), refused="parameter 0.weight is torch.float16, expected torch.float32", instead='autocast = "float16"'
    ),
    "extra state": Idiom(Counting),
    "extra state that cannot be read": Idiom(
        lambda: Counting(Unreadable()), refused="_extra_state of the state cannot be saved", instead="numbers, text, tensors"
    ),
    "lazy modules run once": Idiom(lazy_run_once),
    "lazy modules": Idiom(
        lazy, refused="0.weight of a lazy module has no shape yet", instead="run a batch through the model in the factory"
    ),
    "adversarial samples": Idiom(net, step=adversarial),
    "gradient penalty": Idiom(net, step=gradient_penalty),
    "several losses": Idiom(net, step=several_losses),
    "mixup": Idiom(net, step=mixed_up),
    "backward in the step": Idiom(
        net, step=leaving_gradients, refused="backward in the step left a gradient of", instead="return the loss alone"
    ),
    "weights clipped in the step": Idiom(
        net, step=clipping_weights, refused="changed in place", instead="torch.nn.utils.parametrize"
    ),
    "load_state_dict in the step": Idiom(net, step=loading, refused="changed in place", instead="init_from, for initial weights"),
}
