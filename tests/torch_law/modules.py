"""Modules of torch.nn that hold state or randomness, and those that most models are made of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.torch_law.law import Idiom


class Through(nn.Module):
    """Vectors of 8 in some shape through a layer, and then a linear layer to two classes."""

    def __init__(
        self, layer: nn.Module, shape: tuple[int, ...], out: int, into: Callable[[Any], Tensor] = lambda value: value
    ) -> None:
        super().__init__()
        self.layer, self.shape, self.into = layer, shape, into
        self.head = nn.Linear(out, 2)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(self.into(self.layer(x.reshape(-1, *self.shape))).flatten(1))
        return found


def through(
    make: Callable[[], nn.Module], shape: tuple[int, ...], out: int, into: Callable[[Any], Tensor] = lambda value: value
) -> Idiom:
    return Idiom(lambda: Through(make(), shape, out, into))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, dropout=0.1, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.attention(x, x, x)[0]
        return found


class Tokens(nn.Module):
    """The sign of each element is a token."""

    def __init__(self, embedding: nn.Module) -> None:
        super().__init__()
        self.embedding = embedding

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.embedding((x > 0).long())
        return found


def first(value: Any) -> Tensor:
    found: Tensor = value[0]
    return found


class _Bilinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.both, self.head = nn.Bilinear(4, 4, 3), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(self.both(x[:, :4], x[:, 4:]))
        return found


class _Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.TransformerDecoderLayer(4, 2, 8, batch_first=True), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        pairs = x.reshape(-1, 2, 4)
        found: Tensor = self.head(self.layer(pairs, pairs).flatten(1))
        return found


class _Cell(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.LSTMCell(4, 3), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        state = None
        for each in x.reshape(-1, 2, 4).unbind(1):
            state = self.cell(each, state)
        assert state is not None
        found: Tensor = self.head(state[0])
        return found


class _Recurrent(nn.Module):
    def __init__(self, cell: nn.Module) -> None:
        super().__init__()
        self.cell, self.head = cell, nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        state = None
        for each in x.reshape(-1, 2, 4).unbind(1):
            state = self.cell(each, state)
        found: Tensor = self.head(state)
        return found


class _Translator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.both = nn.Transformer(4, 2, 1, 1, 8, dropout=0.1, batch_first=True)
        self.head = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        pairs = x.reshape(-1, 2, 4)
        found: Tensor = self.head(self.both(pairs, pairs).flatten(1))
        return found


class _Listed(nn.Module):
    def __init__(self, layers: nn.ModuleList) -> None:
        super().__init__()
        self.layers, self.head = layers, nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x).tanh()
        found: Tensor = self.head(x)
        return found


class _Named(nn.Module):
    def __init__(self, layers: nn.ModuleDict) -> None:
        super().__init__()
        self.layers, self.head = layers, nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(self.layers["a"](self.layers["b"](x).relu()))
        return found


class _Weighted(nn.Module):
    def __init__(self, weights: nn.ParameterList) -> None:
        super().__init__()
        self.weights, self.head = weights, nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(x * self.weights[0] + self.weights[1])
        return found


class _WeightedByName(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterDict({"scale": nn.Parameter(torch.ones(8)), "shift": nn.Parameter(torch.zeros(8))})
        self.head = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(x * self.weights["scale"] + self.weights["shift"])
        return found


class RunningMean(nn.Module):
    """Replaces a buffer, and counts in another."""

    def __init__(self, *, persistent: bool = True) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8), persistent=persistent)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.mean(0).detach()
            self.steps += 1
        return x - self.mean


class Codebook(nn.Module):
    """[VQ-VAE]: the nearest code, which follows the mean of what came to it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("codes", torch.linspace(-1, 1, 32).view(4, 8))

    def forward(self, x: Tensor) -> Tensor:
        nearest = torch.cdist(x, self.codes).argmin(dim=1)
        if self.training:
            for code in nearest.unique():
                self.codes[code].mul_(0.9).add_(x[nearest == code].mean(0).detach(), alpha=0.1)
        return x + self.codes[nearest]


class Queue(nn.Module):
    """[MoCo]: the newest samples, at a place that goes round."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(20, 8))
        self.register_buffer("at", torch.zeros(1, dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        found = x + 0.1 * torch.softmax(x @ self.seen.T.clone(), dim=1) @ self.seen.clone()
        if self.training:
            places = (self.at + torch.arange(len(x))) % 20
            self.seen[places] = x
            self.at = (self.at + len(x)) % 20
        return found


class Late(nn.Module):
    """Knows the shape of its buffer when it sees a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", None)

    def forward(self, x: Tensor) -> Tensor:
        if self.scale is None:
            self.scale = x.abs().mean(0).detach()
        return x / self.scale


ZOO: dict[str, Idiom] = {
    "Linear": through(lambda: nn.Linear(8, 8), (8,), 8),
    "Linear without bias": through(lambda: nn.Linear(8, 8, bias=False), (8,), 8),
    "Bilinear": Idiom(_Bilinear),
    "Conv1d": through(lambda: nn.Conv1d(2, 3, 2), (2, 4), 9),
    "Conv2d": through(lambda: nn.Conv2d(2, 3, 2), (2, 2, 2), 3),
    "Conv3d": through(lambda: nn.Conv3d(1, 3, 2), (1, 2, 2, 2), 3),
    "ConvTranspose1d": through(lambda: nn.ConvTranspose1d(2, 3, 2), (2, 4), 15),
    "ConvTranspose2d": through(lambda: nn.ConvTranspose2d(2, 3, 2), (2, 2, 2), 27),
    "depthwise Conv2d": through(lambda: nn.Conv2d(2, 4, 2, groups=2), (2, 2, 2), 4),
    "Dropout": through(lambda: nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.3)), (8,), 8),
    "Dropout1d": through(lambda: nn.Dropout1d(0.3), (2, 4), 8),
    "Dropout2d": through(lambda: nn.Dropout2d(0.3), (2, 2, 2), 8),
    "Dropout3d": through(lambda: nn.Dropout3d(0.3), (2, 2, 2, 1), 8),
    "AlphaDropout": through(lambda: nn.AlphaDropout(0.3), (8,), 8),
    "FeatureAlphaDropout": through(lambda: nn.FeatureAlphaDropout(0.3), (2, 4), 8),
    "RReLU": through(nn.RReLU, (8,), 8),
    "PReLU": through(lambda: nn.PReLU(2), (2, 4), 8),
    "MaxPool2d": through(lambda: nn.MaxPool2d(2), (2, 2, 2), 2),
    "BatchNorm1d": through(lambda: nn.BatchNorm1d(8), (8,), 8),
    "BatchNorm1d, plain means": through(lambda: nn.BatchNorm1d(2, momentum=None), (2, 4), 8),
    "BatchNorm1d without parameters": through(lambda: nn.BatchNorm1d(8, affine=False), (8,), 8),
    "BatchNorm1d without statistics": through(lambda: nn.BatchNorm1d(8, track_running_stats=False), (8,), 8),
    "BatchNorm2d": through(lambda: nn.Sequential(nn.Conv2d(2, 2, 1), nn.BatchNorm2d(2)), (2, 2, 2), 8),
    "BatchNorm3d": through(lambda: nn.BatchNorm3d(2), (2, 2, 2, 1), 8),
    "InstanceNorm1d with statistics": through(lambda: nn.InstanceNorm1d(2, track_running_stats=True), (2, 4), 8),
    "spectral_norm": through(lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8)), (8,), 8),
    "spectral_norm, by hooks": through(lambda: nn.utils.spectral_norm(nn.Linear(8, 8)), (8,), 8),
    "a running mean": through(RunningMean, (8,), 8),
    "a codebook": through(Codebook, (8,), 8),
    "a queue of samples": through(Queue, (8,), 8),
    "a buffer of None at first": through(Late, (8,), 8),
    "a buffer that does not persist": through(lambda: RunningMean(persistent=False), (8,), 8),
    "LayerNorm": through(lambda: nn.LayerNorm(8), (8,), 8),
    "RMSNorm": through(lambda: nn.RMSNorm(8), (8,), 8),
    "GroupNorm": through(lambda: nn.GroupNorm(2, 4), (4, 2), 8),
    "InstanceNorm1d": through(lambda: nn.InstanceNorm1d(2, affine=True), (2, 4), 8),
    "LocalResponseNorm": through(lambda: nn.LocalResponseNorm(2), (4, 2), 8),
    "Embedding": through(lambda: Tokens(nn.Embedding(2, 3)), (8,), 24),
    "Embedding with padding": through(lambda: Tokens(nn.Embedding(2, 3, padding_idx=0)), (8,), 24),
    "Embedding with max_norm": Idiom(
        lambda: Through(Tokens(nn.Embedding(2, 3, max_norm=0.5)), (8,), 24),
        refused="layer.embedding.weight was changed in place by the model",
        instead="normalise in forward: F.embedding(x, F.normalize(weight))",
    ),
    "EmbeddingBag": through(lambda: Tokens(nn.EmbeddingBag(2, 3)), (8,), 3),
    "MultiheadAttention": through(Attention, (2, 4), 8),
    "TransformerEncoderLayer": through(lambda: nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), (2, 4), 8),
    "TransformerDecoderLayer": Idiom(_Decoder),
    "RNN": through(lambda: nn.RNN(4, 3, batch_first=True), (2, 4), 6, first),
    "LSTM": through(lambda: nn.LSTM(4, 3, batch_first=True, num_layers=2, dropout=0.2), (2, 4), 6, first),
    "GRU": through(lambda: nn.GRU(4, 3, batch_first=True, bidirectional=True), (2, 4), 12, first),
    "LSTM with projection": through(lambda: nn.LSTM(4, 3, proj_size=2, batch_first=True), (2, 4), 4, first),
    "LSTMCell": Idiom(_Cell),
    "GRUCell": Idiom(lambda: _Recurrent(nn.GRUCell(4, 3))),
    "RNNCell": Idiom(lambda: _Recurrent(nn.RNNCell(4, 3))),
    "Transformer": Idiom(_Translator),
    "FractionalMaxPool2d": through(lambda: nn.FractionalMaxPool2d(2, output_size=1), (2, 2, 2), 2),
    "ConvTranspose3d": through(lambda: nn.ConvTranspose3d(2, 1, 1), (2, 2, 2, 1), 4),
    "PixelShuffle": through(lambda: nn.PixelShuffle(2), (4, 2, 1), 8),
    "Softplus, ELU, GLU": through(lambda: nn.Sequential(nn.Softplus(), nn.ELU(), nn.GLU()), (8,), 4),
    "Softmax after Linear": through(lambda: nn.Sequential(nn.Linear(8, 8), nn.Softmax(dim=1)), (8,), 8),
    "ModuleList": Idiom(lambda: _Listed(nn.ModuleList(nn.Linear(8, 8) for _ in range(2)))),
    "ModuleDict": Idiom(lambda: _Named(nn.ModuleDict({"b": nn.Linear(8, 8), "a": nn.Linear(8, 8)}))),
    "ParameterList": Idiom(lambda: _Weighted(nn.ParameterList([torch.ones(8), torch.zeros(8)]))),
    "ParameterDict": Idiom(_WeightedByName),
}
