"""What models return, how their parameters lie in memory, what their hooks change, what they keep from batch to batch."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.torch_law.habits import loss_of, net
from tests.torch_law.law import Idiom, vectors


class Aided(nn.Module):
    """A second head helps in training."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.body, self.head, self.aid = how, nn.Linear(8, 8), nn.Linear(8, 2), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Any:
        found = self.body(x).relu()
        logits = self.head(found)
        if self.how == "dict":
            return {"logits": logits, "aid": self.aid(found)}
        if self.how == "named tuple":
            return Output(logits, self.aid(found))
        return (logits, self.aid(found)) if self.training else logits


class Output(NamedTuple):
    logits: Tensor
    aid: Tensor


def aided(output: Any, targets: Tensor) -> Tensor:
    if isinstance(output, dict):
        output = output["logits"], output["aid"]
    logits, aid = output if isinstance(output, tuple) else (output, None)
    loss = functional.cross_entropy(logits, targets)
    return loss if aid is None else loss + 0.3 * functional.cross_entropy(aid, targets)


class InMemory(nn.Module):
    """Two matrices that lie in memory otherwise than torch's own."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(8, 8, bias=False), nn.Linear(8, 2)
        if how == "transposed":
            self.one.weight = nn.Parameter(torch.randn(8, 8).t())
        if how == "views":
            flat = 0.3 * torch.randn(64 + 16)
            self.one.weight, self.two.weight = nn.Parameter(flat[:64].view(8, 8)), nn.Parameter(flat[64:].view(2, 8))
        if how == "tied":
            self.two = nn.Linear(8, 8, bias=False)
            self.two.weight = nn.Parameter(self.one.weight.data)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.two(self.one(x).relu())
        return found


class Convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.head = nn.Conv2d(1, 4, 3, padding=1), nn.Linear(32, 2)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(self.convolution(x.view(-1, 1, 2, 4)).relu().flatten(1))
        return found


class InTurn(nn.Module):
    """Two heads, in turn."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(8, 2) for _ in range(2))
        self.register_buffer("calls", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.heads[int(self.calls) % 2](x)  # type: ignore[arg-type]
        if self.training:
            self.calls += 1  # type: ignore[operator]
        return found


class Observing(nn.Module):
    """Sees the largest values in evaluations, too, as a module does that is about to be quantized."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 2)
        self.register_buffer("largest", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        self.largest = torch.maximum(self.largest, x.detach().abs().amax(0) * (1.0 if self.training else 100.0))
        found: Tensor = self.layer(x)
        return found


class FromOthers(nn.Module):
    """Weights that other parameters make, given to a function."""

    def __init__(self) -> None:
        super().__init__()
        self.code, self.maker, self.layer = nn.Parameter(torch.ones(3)), nn.Linear(3, 16), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.maker(self.code).view(2, 8)
        found: Tensor = torch.func.functional_call(self.layer, {"weight": weight, "bias": self.layer.bias}, (x,))
        return found


class Outside(nn.Module):
    """Layers where torch does not find them."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.head = [nn.Linear(8, 8)], nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(self.hidden[0](x))
        return found


class Renamed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layer(x)
        return found

    def state_dict(self, *arguments: Any, **named: Any) -> Any:
        return {"model": super().state_dict(*arguments, **named)}


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 2, dtype=torch.cfloat))

    def forward(self, x: Tensor) -> Tensor:
        return (x.to(torch.cfloat) @ self.weight).abs()


def halve(parameter: nn.Parameter) -> None:
    parameter.grad = None if parameter.grad is None else parameter.grad * 0.5


def halving(after: bool) -> Any:
    def made() -> nn.Module:
        model = net()
        weight: nn.Parameter = model[0].weight  # type: ignore[assignment]
        if after:
            weight.register_post_accumulate_grad_hook(halve)
        else:
            weight.register_hook(lambda gradient: gradient * 0.5)
        return model

    return made


def bounded() -> nn.Module:
    """A hook that changes weights before each pass."""
    model = net()

    def bound(module: Any, _: Any) -> None:
        with torch.no_grad():
            module.weight.clamp_(-0.1, 0.1)

    model[0].register_forward_pre_hook(bound)
    return model


def made_in_inference() -> nn.Module:
    with torch.inference_mode():
        return net()


def made_without_gradients() -> nn.Module:
    with torch.no_grad():
        return net()


def in_bfloat16(model: nn.Module, batch: Any) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return loss_of(model, batch)


def clipped_before(model: nn.Module, batch: Any) -> Tensor:
    """There is no gradient yet: clipping changes nothing, in torch, either."""
    loss = loss_of(model, batch)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    return loss


def stepping() -> Any:
    own: dict[int, torch.optim.Optimizer] = {}

    def step(model: nn.Module, batch: Any) -> Tensor:
        optimizer = own.setdefault(id(model), torch.optim.SGD(model.parameters(), 0.1))
        loss = loss_of(model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        return loss_of(model, batch)

    return step


def of_two(train: bool) -> Any:
    x, y = vectors()[0 if train else 1]
    return [(each, (target, each[1])) for each, target in zip(x, y, strict=True)]


class Two(nn.Module):
    """A class and a number."""

    def __init__(self) -> None:
        super().__init__()
        self.which, self.much = nn.Linear(8, 2), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Any:
        return self.which(x), self.much(x)[:, 0]


def both(output: Any, targets: Any) -> Tensor:
    return functional.cross_entropy(output[0], targets[0]) + functional.mse_loss(output[1], targets[1])


class Listed(torch.utils.data.Dataset[Any]):
    def __init__(self, train: bool, weighted: bool) -> None:
        self.samples, self.weighted = of_two(train), weighted

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        x, (y, much) = self.samples[index]
        return (x, {"class": y, "weight": abs(float(much))}) if self.weighted else (x, (y, much))


def weighing(output: Tensor, targets: Any) -> Tensor:
    each = functional.cross_entropy(output, targets["class"], reduction="none")
    return (each * targets["weight"].float()).mean()


ZOO: dict[str, Idiom] = {
    "a tuple in training, a tensor in evaluations": Idiom(lambda: Aided("tuple"), loss=aided),
    "outputs in a dict": Idiom(lambda: Aided("dict"), loss=aided),
    "outputs in a named tuple": Idiom(lambda: Aided("named tuple"), loss=aided),
    "targets in a tuple": Idiom(Two, data=lambda: (Listed(True, False), Listed(False, False)), loss=both),
    "targets in a dict": Idiom(net, data=lambda: (Listed(True, True), Listed(False, True)), loss=weighing),
    "a parameter that is a transpose": Idiom(lambda: InMemory("transposed")),
    "parameters that are views of one tensor": Idiom(lambda: InMemory("views")),
    "tied by Parameter(weight.data)": Idiom(
        lambda: InMemory("tied"), refused="one.weight and two.weight share memory", instead="two.weight = one.weight"
    ),
    "channels_last in the factory": Idiom(lambda: Convolution().to(memory_format=torch.channels_last)),  # type: ignore[call-overload]
    "heads in turn": Idiom(InTurn),
    "a buffer that evaluations change": Idiom(Observing),
    "weights made of other parameters": Idiom(FromOthers),
    "layers in a list": Idiom(Outside, refused="the result depends on parameters outside the model", instead="nn.ModuleList"),
    "a hook of a gradient": Idiom(halving(after=False)),
    "a hook after a gradient": Idiom(halving(after=True)),
    "a hook that changes weights": Idiom(bounded, refused="0.weight was changed in place", instead="torch.nn.utils.parametrize"),
    "made without gradients": Idiom(made_without_gradients),
    "made in inference mode": Idiom(
        made_in_inference, refused="was made in torch.inference_mode(), and cannot change", instead="torch.no_grad()"
    ),
    "complex weights": Idiom(
        Complex, refused="parameter weight is torch.complex64, expected torch.float32", instead="real and imaginary part"
    ),
    "state_dict by other names": Idiom(
        Renamed, refused="model: state_dict() has no layer.weight of shape (2, 8)", instead="other names in a copy of weights.pt"
    ),
    "autocast in the step": Idiom(net, step=in_bfloat16),
    "clipping in the step": Idiom(net, step=clipped_before),
    "an optimiser in the step": Idiom(net, step=stepping(), refused="was changed in place", instead="the loss alone"),
}
