"""The system of [Chen16]: TensorFlow's SyncReplicasOptimizer (`tf.compat.v1`), with a parameter server, place 0, and workers.

Of more than two workers, two make an update, and what comes later is dropped. Images are those that were applied.

`python tensorflow_sync_replicas.py CASE MU UPDATES PLACE PLACES PORT`; ports PORT ... PORT + PLACES - 1 are used.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time

import tensorflow as tf

v1 = tf.compat.v1
WARM_UP = 10
AGGREGATED = 2


def logits(case: str, images: tf.Tensor) -> tf.Tensor:
    """The networks of the cases; images are (mu, 32, 32, 3), the format that is faster here, too."""

    def weights(name: str, shape: list[int]) -> tuple[tf.Variable, tf.Variable]:
        start = v1.initializers.variance_scaling()
        return v1.get_variable(f"{name}w", shape, initializer=start), v1.get_variable(
            f"{name}b", shape[-1:], initializer=v1.initializers.zeros()
        )

    def linear(name: str, x: tf.Tensor, width: int) -> tf.Tensor:
        w, b = weights(name, [int(x.shape[1]), width])
        return tf.matmul(x, w) + b

    def convolution(name: str, x: tf.Tensor, width: int) -> tf.Tensor:
        w, b = weights(name, [5, 5, int(x.shape[3]), width])
        return tf.nn.bias_add(tf.nn.conv2d(x, w, 1, "SAME"), b)

    if case.startswith("cnn"):
        x = tf.nn.relu(tf.nn.max_pool2d(convolution("1", images, 32), 3, 2, "SAME"))
        x = tf.nn.avg_pool2d(tf.nn.relu(convolution("2", x, 32)), 3, 2, "SAME")
        x = tf.nn.avg_pool2d(tf.nn.relu(convolution("3", x, 64)), 3, 2, "SAME")
        return linear("4", tf.reshape(x, [-1, 1024]), 10)
    x = tf.reshape(images, [-1, 3072])
    for name, width in (("1", 2500), ("2", 1300)):
        x = tf.nn.relu(linear(name, x, width))
    return linear("3", x, 10)


def work(
    case: str, mu: int, updates: int, worker: int, workers: int, server: tf.distribute.Server, cluster: tf.train.ClusterSpec
) -> None:
    """Train as one worker; the chief tells of all when enough updates are made."""
    with v1.device(v1.train.replica_device_setter(worker_device=f"/job:worker/task:{worker}", cluster=cluster)):
        with v1.device(f"/job:worker/task:{worker}"):
            images, targets = (
                tf.random.normal([2048, 32, 32, 3], seed=worker),
                tf.random.uniform([2048], 0, 10, tf.int32, seed=worker),
            )
            data = v1.get_local_variable("images", initializer=images), v1.get_local_variable("targets", initializer=targets)
            at = tf.random.uniform([mu], 0, 2048, tf.int32)
            batch, labels = (tf.gather(each, at) for each in data)
        loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits(case, batch)))
        step = v1.train.get_or_create_global_step()
        inner = v1.train.MomentumOptimizer(0.001, 0.9)
        optimizer = v1.train.SyncReplicasOptimizer(inner, replicas_to_aggregate=AGGREGATED, total_num_replicas=workers)
        train = optimizer.minimize(loss, global_step=step)
    chief = worker == 0
    hooks = [optimizer.make_session_run_hook(chief), v1.train.StopAtStepHook(last_step=WARM_UP + updates)]
    first, start_s, last, end_s = 0, 0.0, 0, 0.0
    config = v1.ConfigProto(intra_op_parallelism_threads=1, inter_op_parallelism_threads=2)
    with v1.train.MonitoredTrainingSession(
        server.target, chief, hooks=hooks, config=config, log_step_count_steps=None, stop_grace_period_secs=1
    ) as session:
        while not session.should_stop():
            _, now = session.run([train, step])
            if now >= WARM_UP and not start_s:
                first, start_s = now, time.perf_counter()
            last, end_s = now, time.perf_counter()
    if chief:
        print(json.dumps({"images": int(last - first) * AGGREGATED * mu, "seconds": end_s - start_s}), flush=True)


def main(case: str, mu: int, updates: int, place: int, places: int, port: int) -> None:
    v1.disable_eager_execution()
    addresses = [f"127.0.0.1:{port + each}" for each in range(places)]
    cluster = tf.train.ClusterSpec({"ps": addresses[:1], "worker": addresses[1:]})
    config = v1.ConfigProto(intra_op_parallelism_threads=1, inter_op_parallelism_threads=2)
    job, task = ("worker", place - 1) if place else ("ps", 0)
    server = tf.distribute.Server(cluster, job_name=job, task_index=task, config=config)
    if place == 0:
        signal.pause()  # servers do not end, nor do workers that wait for a token: the parent ends them after the chief
    work(case, mu, updates, place - 1, places - 1, server, cluster)
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
