"""AlexNet (Krizhevsky, Sutskever, Hinton 2012) for ImageNet inputs.

[Zhang16 4.1] has about 72 M parameters, 289 MB, unexplained; the network of 2012 has 61.0 M. This network keeps its grouped
convolutions and widths, but pads the last pooling to 7x7 pixels, not 6x6: 74,596,712 parameters for 1000 classes, 298 MB. No local
response normalisation; torch's default initialisation.
"""

from __future__ import annotations

from torch import nn

from mpisgd.models.small import require

_UNITS = 4096


def make(input_shape: tuple[int, ...], classes: int) -> nn.Module:
    require(input_shape in ((3, 227, 227), (3, 224, 224)), "alexnet", input_shape, "(3, 227, 227) or (3, 224, 224)")
    return nn.Sequential(
        nn.Conv2d(3, 96, 11, stride=4, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(3, stride=2),
        nn.Conv2d(96, 256, 5, padding=2, groups=2),
        nn.ReLU(),
        nn.MaxPool2d(3, stride=2),
        nn.Conv2d(256, 384, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(384, 384, 3, padding=1, groups=2),
        nn.ReLU(),
        nn.Conv2d(384, 256, 3, padding=1, groups=2),
        nn.ReLU(),
        nn.MaxPool2d(3, stride=2, padding=1),
        nn.Flatten(),
        nn.Dropout(0.5),
        nn.Linear(256 * 7 * 7, _UNITS),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Linear(_UNITS, _UNITS),
        nn.ReLU(),
        nn.Linear(_UNITS, classes),
    )
