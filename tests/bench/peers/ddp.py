"""torch's DistributedDataParallel over gloo, one process on each node: an allreduce of gradients behind the backward pass.

`python ddp.py CASE MU UPDATES PLACE PLACES ADDRESS [fp16]`, with GLOO_SOCKET_IFNAME; ADDRESS is host:port of place 0, and PLACE `-`
the rank that a launcher has given. With fp16, its hook halves the bytes.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

sys.path.insert(0, str(Path(__file__).parent))

from torch_networks import WARM_UP, Batches, make


def main(case: str, mu: int, updates: int, place: int, places: int, address: str, hook: str = "") -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"tcp://{address}", rank=place, world_size=places)
    model = nn.parallel.DistributedDataParallel(make(case), gradient_as_bucket_view=not hook)
    if hook:
        model.register_comm_hook(torch.distributed.group.WORLD, default_hooks.fp16_compress_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9, fused=True)
    batches, start_s = Batches(mu, place), 0.0
    for update in range(WARM_UP + updates):
        if update == WARM_UP:
            torch.distributed.barrier()
            start_s = time.perf_counter()
        inputs, targets = batches.next()
        optimizer.zero_grad(set_to_none=False)
        nn.functional.cross_entropy(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    print(json.dumps({"images": mu * updates, "seconds": time.perf_counter() - start_s}), flush=True)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    launched = next((os.environ[name] for name in ("OMPI_COMM_WORLD_RANK", "PMI_RANK") if name in os.environ), "")
    mu_, updates_, place_, places_ = (int(launched if word == "-" else word) for word in sys.argv[2:6])
    main(sys.argv[1], mu_, updates_, place_, places_, *sys.argv[6:])
