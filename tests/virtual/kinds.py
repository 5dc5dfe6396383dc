"""All kinds of runs that a replay makes again to the same bits: `test_run_again.py`. Each is what it has besides `jobs.TENSORS`.

A new feature gets its lines here, beside what it goes with, instead of a test of its replay.
"""

from __future__ import annotations

from typing import Any

from mpisgd.protocols import PROTOCOLS

Options = dict[str, Any]

SOFTSYNC: Options = {"protocol": {"name": "softsync", "n": 2}, "shards": 2}
STALEST: Options = {"protocol": {"name": "softsync", "n": 4}}
HARDSYNC: Options = {"protocol": {"name": "hardsync"}, "shards": 2}
ASYNC: Options = {"protocol": {"name": "async"}, "shards": 2}
BACKUP: Options = {"protocol": {"name": "backup", "b": 1}}
ABORT: Options = {"protocol": {"name": "backup", "b": 1, "abort": True}}
SSP: Options = {"protocol": {"name": "ssp", "get_model_frequency": 3}}
DOWNPOUR: Options = {"protocol": {"name": "downpour", "n_push": 2, "n_fetch": 4}}
ALLREDUCE: Options = {"protocol": {"name": "allreduce"}, "shards": 1}
LAYERS: Options = {"per_layer": True}
BFLOAT16: Options = {"push_format": "bfloat16", "pull_format": "bfloat16"}
TOPK: Options = {"push_format": "topk", "topk_share": 0.1}
TEAM: Options = {"aggregation": "node", "virtual": {"ranks_per_node": 9}}
PAIRS: Options = {"aggregation": "node", "team_size": 2, "virtual": {"ranks_per_node": 9}}
LOCAL: Options = {"local_steps": 2, "inner_alpha0": 0.01, "alpha0": 0.5}
LEAVES: Options = {"failures": {"at_s": {"1": 0.0}, "notice_s": 60.0}}
PATIENCE: Options = {"every_epochs": 0.25, "best": "error", "patience": 2}
GROUPS: Options = {"model": {"name": "mlp", "hidden": [8, 8]}, "group_size": 2, "micro_batches": 2, "shards": 2}
NESTEROV: Options = {"name": "sgd", "momentum": 0.9, "nesterov": True}
FAST: Options = {"name": "exponential", "beta": 0.5, "every_epochs": 0.5, "warmup_epochs": 0.2}
#: Nothing but a gradient costs time: many things happen at the same virtual instant.
AT_ONCE: Options = {
    "compute": {"name": "constant", "mean_s": 0.1},
    "network": {name: 0.0 if name.endswith("_s") else 1e18 for name in ("latency_s", "overhead_s", "bandwidth", "local_bandwidth")},
    "service": {"gradient_s": 0.1, "gradient_s_per_byte": 0.0, "update_s_per_byte": 0.0},
}

_ALONE: dict[str, Options] = {
    "hardsync": HARDSYNC,
    "softsync": SOFTSYNC,
    "async": ASYNC,
    "ssp": {"protocol": {"name": "ssp", "slack": 1}, "shards": 2},
    "backup": {**BACKUP, "shards": 2},
    "backup, late gradients count": {"protocol": {"name": "backup", "b": 1, "late": "apply"}, "shards": 2},
    "backup, late gradients are given up": {**ABORT, "shards": 2},
    "timeout": {"protocol": {"name": "timeout", "N_min": 2, "timeout_s": 0.05}, "shards": 2},
    "versioned": {"protocol": {"name": "versioned", "grads_to_wait": 3}, "shards": 2},
    "downpour": {"protocol": {"name": "downpour", "n_push": 2}, "shards": 2},
    "allreduce": {"protocol": {"name": "allreduce"}, "shards": 4},
    "local steps": {**SOFTSYNC, "local_steps": 2, "inner_alpha0": 0.01},
    "accumulation": {**SOFTSYNC, "accumulation": 2},
    "teams": {**HARDSYNC, "aggregation": "node", "team_size": 2, "virtual": {"learners": 8, "ranks_per_node": 4}},
    "groups": {**SOFTSYNC, **GROUPS},
    "layerwise": {**SOFTSYNC, **LAYERS},
    "duplex": {**SOFTSYNC, "ahead": 1},
    "streamed": {**HARDSYNC, "way": "streamed"},
    "bfloat16": {**SOFTSYNC, **BFLOAT16},
    "top-k": {**SOFTSYNC, **TOPK},
    "momentum, averages": {**SOFTSYNC, "optimizer": {"name": "sgd", "momentum": 0.9}, "averaging": 0.9},
    "adam": {**SOFTSYNC, "optimizer": {"name": "adam"}},
    "compensation": {**ASYNC, "compensation": 0.5},
    "the average clipped": {**HARDSYNC, "clip_average": 0.5},
    "batch norm": {**SOFTSYNC, "model": {"name": "mlp", "hidden": [8], "batch_norm": True}},
    "dealt": {**SOFTSYNC, "sampling": "dealt", "straggler": {"slowdown": {"1": 4.0}}},
    "an evaluator": {**SOFTSYNC, "evaluator": True, "evaluation": {"every_epochs": 0.5}},
    "evaluations end training": {**SOFTSYNC, "evaluator": True, "alpha0": 0.0, "evaluation": PATIENCE, "epochs": 8},
    "learners leave": {**SOFTSYNC, "failures": {"at_s": {"1": 1.0}, "then": "leave"}},
    "a learner without a push leaves after the last update": {**SOFTSYNC, **LEAVES},
    "a learner without a pull leaves": {**SOFTSYNC, **LEAVES, **LAYERS},
    "stale gradients count in full": {"protocol": {"name": "softsync", "n": 4, "modulation": "none"}, "alpha0": 0.02},
    "clipped, drawn anew": {**SOFTSYNC, "clip_norm": 0.5, "sampling": "replacement", "schedule": "linear", "linear_scaling": True},
    "corrected averages": {**SOFTSYNC, "averaging": 0.99, "averaging_bias_correction": True},
    "rmsprop": {**BACKUP, "shards": 2, "optimizer": {"name": "rmsprop", "eps": 0.1}},
    "a convolution": {**SOFTSYNC, "data": "digits", "model": "small_cnn", "epochs": 0.15, "optimizer": NESTEROV},
    "own steps of ssp": {**SSP, "shards": 3, "schedule": FAST},
    "all leave": {**SOFTSYNC, "failures": {"at_s": {"0": 0.3, "1": 0.35, "2": 0.6, "3": 0.7}}},
    "two of hardsync leave": {**HARDSYNC, "failures": {"at_s": {"0": 0.35, "2": 0.6}}},
    "two of backup leave": {**BACKUP, "failures": {"at_s": {"3": 0.35, "2": 0.6}}},
    "at once": {**SOFTSYNC, **AT_ONCE, "shards": 3},
    "at once, learners leave": {"protocol": {"name": "backup", "N": 3}, "shards": 2, "failures": {"mean_s": 1.0}, **AT_ONCE},
    "diverged": {**SOFTSYNC, "alpha0": 1e30, "nonfinite": "continue", "averaging": 0.5},
    "sizes alone": {**SOFTSYNC, "virtual": {"gradients": False, "parameters": 1000, "train_samples": 400}},
}  # fmt: skip

_BOTH_WAYS: dict[str, Options] = {
    "bfloat16": {"push_format": "bfloat16", "clip_norm": 0.1},
    "top-k": {**TOPK, "pull_format": "bfloat16", "accumulation": 2},
    "local steps": {"local_steps": 2},
}

#: A feature -> its options, and what it goes with.
_BESIDE: dict[str, tuple[Options, dict[str, Options]]] = {
    "top-k": ({**TOPK, "shards": 2, "alpha0": 0.01, "epochs": 1}, {
        "layers": {**ASYNC, **LAYERS},
        "layers of one clock": {**HARDSYNC, **LAYERS},
        "teams": {**HARDSYNC, **PAIRS},
        "local steps": {**HARDSYNC, **LOCAL, "alpha0": 0.7},
        "own steps": DOWNPOUR,
        "both ways": {**SOFTSYNC, "pull_format": "bfloat16"},
        "accumulation": {**ASYNC, "accumulation": 2},
    }),
    "the model's average clipped": ({**HARDSYNC, "clip_average": 0.2, "shards": 3}, {
        "averages": {"averaging": 0.9, "optimizer": "adam", "alpha0": 0.01, "sampling": "dealt"},
        "local steps": {"local_steps": 2, "alpha0": 0.7},
        "bfloat16": {**BFLOAT16, "nonfinite": "drop"},
        "top-k": {"push_format": "topk", "topk_share": 0.3},
        "one leaves": {"failures": {"at_s": {"2": 5.0}, "then": "leave"}},
        "teams": {"aggregation": "node", "virtual": {"ranks_per_node": 2}},
    }),
    "a stale average clipped": ({"protocol": {"name": "softsync", "n": 1}, "clip_average": 0.3, "epochs": 1}, {
        "lamb": {"clip_average_of": "slice", "shards": 2, "optimizer": "lamb"},
        "one shard": {},
        "local steps": {"local_steps": 2, "alpha0": 0.7},
        "allreduce": {**ALLREDUCE, "clip_average_of": "slice"},
    }),
    "large batches": ({**STALEST, "shards": 3, "alpha0": 0.01, "groups": {"weight_decay": {"*.bias": 0.0}}, "epochs": 1}, {
        "lamb": {"optimizer": "lamb", "protocol": {"name": "async"}, "compensation": 0.04, "averaging": 0.9},
        "lars": {"optimizer": "lars"},
        "allreduce": {"optimizer": "lamb", **ALLREDUCE},
        "own steps": {"optimizer": "lars", **SSP, "push_format": "bfloat16"},
        "local steps": {"local_steps": 3, "inner_optimizer": "lamb", "inner_alpha0": 0.01, "optimizer": "sgd"},
    }),
    "a schedule": ({**STALEST, "shards": 2, "schedule": {"name": "OneCycleLR", "warmup_samples": 40}, "alpha0": 0.005}, {
        "own steps": DOWNPOUR,
        "stale gradients": {},
        "adamw": {"schedule": "constant", "optimizer": "adamw", "alpha0": 0.002},
    }),
    "an inner optimizer": ({
        **HARDSYNC,
        "local_steps": 3,
        "alpha0": 0.7,
        "optimizer": {"name": "sgd", "momentum": 0.9, "nesterov": True},
        "inner_alpha0": 0.003,
        "inner_optimizer": {"name": "adamw", "weight_decay": 0.5, "eps": 1e-3},
    }, {
        "stale rounds": STALEST,
        "rejected rounds": {"protocol": {"name": "versioned", "tolerance": 1}},
        "dropped rounds": BACKUP,
        "ssp": {"protocol": {"name": "ssp", "slack": 2}},
        "bfloat16": {"push_format": "bfloat16"},
        "compensation": {"compensation": 0.1, "protocol": "async"},
    }),
    "own samples": ({"sampling": "own", "epochs": 1}, {
        "teams": {"protocol": "hardsync", "aggregation": "node", "virtual": {"ranks_per_node": 2}},
        "softsync": SOFTSYNC,
        "local steps": {"protocol": "hardsync", "local_steps": 2, "alpha0": 0.5},
        "accumulation": {"protocol": "hardsync", "accumulation": 3},
        "layers": {"protocol": {"name": "softsync", "n": 2}, **LAYERS},
        "timeout": {"protocol": {"name": "timeout", "N": 3, "timeout_s": 0.5}},
    }),
    "accumulation": ({"accumulation": 3}, {
        "stale gradients": {**STALEST, "shards": 2},
        "a team": {**ALLREDUCE, **TEAM},
        "own steps": DOWNPOUR,
        "own steps of ssp": {
            "protocol": {"name": "ssp", "slack": 1, "get_model_frequency": 2},
            "schedule": {"name": "step", "epochs": [0.2]},
        },
        "rejected": {"protocol": {"name": "versioned"}, "shards": 2},
        "given up": {**ABORT, "straggler": {"delay": "exponential", "delay_mean_s": 0.1}},
        "top-k, layers": {"protocol": "async", "push_format": "topk", "shards": 2, **LAYERS},
        "local steps": {"local_steps": 2, "alpha0": 0.5},
    }),
    "duplex": ({**SOFTSYNC, "ahead": 1}, _BOTH_WAYS),
    "prefetch": ({**SOFTSYNC, "ahead": 2}, _BOTH_WAYS),
    "autocast": ({"autocast": "bfloat16", "epochs": 1}, {
        "layers": {**ASYNC, **LAYERS},
        "allreduce": ALLREDUCE,
        "local steps": {"local_steps": 3, "alpha0": 0.5, "shards": 3},
    }),
    "links in turns": ({"epochs": 1, "network": {"turn_nbytes": 64, "core_bandwidth": 1e6, "node_bandwidth": 1e5}}, {
        "gathered layers": {**HARDSYNC, "way": "gathered", **LAYERS},
        "hardsync": HARDSYNC,
        "async": ASYNC,
        "streamed": {**HARDSYNC, "way": "streamed"},
        "gathered duplex": {"protocol": "softsync", "shards": 2, "way": "gathered", "ahead": 1},
        "allreduce": {**ALLREDUCE, "way": "buckets"},
    }),
    "dealt": ({"shards": 2, "sampling": "dealt", "straggler": {"slowdown": {"1": 8.0}}}, {
        **{name: {"protocol": {"name": name}} for name in sorted(PROTOCOLS) if name not in ("allreduce", "downpour")},
        "own steps": {"protocol": {"name": "downpour", "n_push": 2}},
        "accumulation": {"protocol": {"name": "softsync"}, "accumulation": 2},
        "local steps": {"protocol": {"name": "async"}, **LOCAL},
        "batched": {"protocol": {"name": "async"}, "virtual": {"batched": True}},
    }),
    "groups": ({"group_size": 3, "shards": 5, "micro_batches": 2, "mu": 12, "model": {"hidden": [5, 4, 6]}, "clip_norm": 0.5}, {
        "local steps": {"local_steps": 2, "protocol": "softsync", "push_format": "bfloat16"},
        "local steps of hardsync": {"local_steps": 3},
    }),
    **{
        f"batch norm, evaluated by {who}": ({
            "model": {"name": "mlp", "hidden": [8], "batch_norm": True},
            "evaluation": {"every_epochs": 0.2},
            "evaluator": who == "an evaluator",
            "epochs": 1,
        }, {
            "duplex": {"protocol": "softsync", "ahead": 1},
            "prefetch": {"protocol": "softsync", "ahead": 2},
            "layers": {"protocol": "softsync", "shards": 2, **LAYERS},
            "own steps": DOWNPOUR,
            "dropped": {"protocol": "backup", "compute": {"name": "normal"}},
            "recalibrated": {"protocol": "softsync", "evaluation": {"every_epochs": 0.2, "buffers": "recalibrate"}},
            "local steps": {"protocol": "hardsync", "local_steps": 2},
        })
        for who in ("an evaluator", "shard 0")
    },
}  # fmt: skip

KINDS: dict[str, Options] = {
    **_ALONE,
    **{f"{feature}; {name}": {**base, **more} for feature, (base, beside) in _BESIDE.items() for name, more in beside.items()},
}
