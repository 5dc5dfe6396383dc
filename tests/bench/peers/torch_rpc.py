"""torch's own parameter server, in the shape of its tutorial on batched RPC with asynchronous execution: place 0 is the server,
which holds the model; a trainer sends its gradients, and is answered with the model when those of all are there.

`python torch_rpc.py CASE MU UPDATES PLACE PLACES PORT`
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed import rpc

sys.path.insert(0, str(Path(__file__).parent))

from torch_networks import WARM_UP, Batches, make

Future = torch.futures.Future[nn.Module]
Reference = Any  # rpc.RRef[Server]


class Server:
    """The model, its gradients in the making, and the optimiser."""

    def __init__(self, case: str, trainers: int) -> None:
        torch.set_num_threads(1)
        self.model: nn.Module = make(case)
        self.lock = threading.Lock()
        self.future: Future = torch.futures.Future()
        self.trainers = trainers
        self.there = 0
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.001, momentum=0.9, fused=True)
        self.sums = [torch.zeros_like(parameter) for parameter in self.model.parameters()]
        for parameter, summed in zip(self.model.parameters(), self.sums, strict=True):
            parameter.grad = summed

    def get_model(self) -> nn.Module:
        return self.model

    @staticmethod
    @rpc.functions.async_execution  # type: ignore[untyped-decorator]
    def update_and_fetch_model(server: Reference, gradients: list[torch.Tensor]) -> Future:
        self: Server = server.local_value()
        with self.lock:
            self.there += 1
            for summed, gradient in zip(self.sums, gradients, strict=True):
                summed.add_(gradient)
            future = self.future
            if self.there == self.trainers:
                for summed in self.sums:
                    summed.div_(self.trainers)
                self.there = 0
                self.optimizer.step()
                self.optimizer.zero_grad(set_to_none=False)
                future.set_result(self.model)
                self.future = torch.futures.Future()
        return future


def train(server: Reference, mu: int, updates: int, place: int) -> tuple[int, float]:
    """Train as one trainer; returns images and seconds, after the warm-up."""
    torch.set_num_threads(1)
    batches, model, start_s = Batches(mu, place), server.rpc_sync().get_model(), 0.0
    for update in range(WARM_UP + updates):
        if update == WARM_UP:
            start_s = time.perf_counter()
        inputs, targets = batches.next()
        nn.functional.cross_entropy(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
        gradients = [parameter.grad for parameter in model.cpu().parameters()]
        model = rpc.rpc_sync(server.owner(), Server.update_and_fetch_model, args=(server, gradients))
    return mu * updates, time.perf_counter() - start_s


def main(case: str, mu: int, updates: int, place: int, places: int, port: int) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    options = rpc.TensorPipeRpcBackendOptions(num_worker_threads=4, rpc_timeout=600)
    rpc.init_rpc(f"place-{place}", rank=place, world_size=places, rpc_backend_options=options)  # type: ignore[no-untyped-call]
    if place == 0:
        server = rpc.RRef(Server(case, places - 1))
        asked = [rpc.rpc_async(f"place-{each}", train, args=(server, mu, updates, each)) for each in range(1, places)]
        for images, seconds in (each.wait() for each in asked):
            print(json.dumps({"images": images, "seconds": seconds}), flush=True)
    rpc.shutdown()


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
