"""Sizes and seconds of the blocks of Inception-v3, measured once and kept in inception-v3/layers.json: `--measure` does it again.

That needs torchvision; no data. One thread, mini-batches of 8 random images of 299 x 299, the median of seven. A block's forward
seconds last until the next block begins, so those of poolings are the block's before; its backward seconds end when the gradients
of all its parameters are there. Without the auxiliary classifier.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

HERE = Path(__file__).parent
KEPT = HERE / "inception-v3" / "layers.json"
BATCH = 8
TIMES = 7


def kept() -> dict[str, Any]:
    """`layers`: name -> parameters, `forward_s` and `backward_s`: name -> seconds, and where and when they were measured."""
    return dict(json.loads(KEPT.read_text("utf-8")))


def measured() -> dict[str, Any]:
    import torchvision

    torch.set_num_threads(1)
    torch.manual_seed(1)
    model = torchvision.models.inception_v3(weights=None, aux_logits=False, init_weights=False).train()
    blocks = {name: block for name, block in model.named_children() if any(True for _ in block.parameters())}
    passes = [_passes(model, blocks) for _ in range(1 + TIMES)][1:]
    forward, backward = ({name: float(np.median([each[at][name] for each in passes])) for name in blocks} for at in (0, 1))
    return {
        "layers": {name: sum(each.numel() for each in block.parameters()) for name, block in blocks.items()},
        "forward_s": {name: round(seconds, 6) for name, seconds in forward.items()},
        "backward_s": {name: round(seconds, 6) for name, seconds in backward.items()},
        "batch": BATCH,
        "processor": platform.processor() or platform.machine(),
        "versions": {"torch": str(torch.__version__), "torchvision": str(torchvision.__version__)},
        "date": time.strftime("%Y-%m-%d"),
    }


def _passes(model: torch.nn.Module, blocks: dict[str, torch.nn.Module]) -> tuple[dict[str, float], dict[str, float]]:
    """Seconds of each block, forward and backward, of one mini-batch."""
    begun, left, hooks = {}, defaultdict[str, float](float), []

    def begins(name: str) -> Any:
        return lambda *_: begun.update({name: time.perf_counter()})

    def leaves(name: str) -> Any:
        return lambda _: left.update({name: time.perf_counter()})

    for name, block in blocks.items():
        hooks.append(block.register_forward_pre_hook(begins(name)))
        hooks += [each.register_post_accumulate_grad_hook(leaves(name)) for each in block.parameters()]
    inputs, targets = torch.randn(BATCH, 3, 299, 299), torch.randint(1000, (BATCH,))
    loss = torch.nn.functional.cross_entropy(model(inputs), targets)
    end_s = time.perf_counter()
    loss.backward()
    for hook in hooks:
        hook.remove()
    model.zero_grad()
    starts = [*begun.values(), end_s]
    order = list(reversed(blocks))
    assert list(begun) == list(blocks) and sorted(left, key=lambda name: left[name]) == order
    ends = [end_s, *(left[name] for name in order)]
    return dict(zip(blocks, np.diff(starts).tolist(), strict=True)), dict(zip(order, np.diff(ends).tolist(), strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure", action="store_true", help="measure again, and keep it")
    if parser.parse_args().measure:
        KEPT.parent.mkdir(exist_ok=True)
        KEPT.write_text(json.dumps(measured(), indent=1) + "\n", "utf-8")
    found = kept()
    print(f"{'block':>14} {'parameters':>11} {'forward [ms]':>13} {'backward [ms]':>14}")
    for name, size in found["layers"].items():
        print(f"{name:>14} {size:>11,} {1e3 * found['forward_s'][name]:>13.2f} {1e3 * found['backward_s'][name]:>14.2f}")


if __name__ == "__main__":
    main()
