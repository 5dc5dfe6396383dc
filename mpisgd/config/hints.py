"""Other frameworks' names for options and keys, with ours.

A name near ours may mean another thing (NAdam is no misspelt adam): then list our choices.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from mpisgd.base.errors import ConfigError, nearest

_RATE = "the learning rate is `alpha0`"
_BATCH = "the mini-batch of each learner is `mu`: lambda learners compute lambda * mu samples at a time"
_RANKS = (
    "ranks are started by mpisgd run -n RANKS, or mpirun -n RANKS; `shards` ranks are shards, one may be an evaluator"
    " (`evaluator`), all others are learners; a virtual cluster has `virtual.learners`"
)
_WORKERS = f"learners load their data themselves; {_RANKS}"
_LENGTH = "the length of a run is `epochs`; a fraction is allowed"
_OUT = "the run's directory is `out`"
_DEVICE = "learners compute on `device`, cpu or cuda; learners of a node take the node's GPUs in turn"
_MPI = "no option is needed: ranks find each other by MPI; start ranks by mpisgd run -n RANKS, or mpirun -n RANKS"
_FLOAT = "weights and sums are float32; `push_format` and `pull_format` bfloat16 halve the bytes sent"
_MOMENTUM = "optimisers have options of their own: `optimizer.momentum`"
_DECAY = "optimisers have options of their own: `optimizer.weight_decay`"
_BETA = "optimisers have options of their own: `optimizer.beta1` and `optimizer.beta2` of adam and adamw"
_CLIP = "gradients are clipped to the norm `clip_norm`"
_CHECKPOINT = "checkpoints are written every `checkpoint.every_updates` updates"
_EVALUATE = "weights are evaluated every `evaluation.every_epochs` epochs"
_TOLD = "a line is printed every `log.progress_s` seconds"
_RESUME = "a run goes on by mpisgd train --resume RUN, RUN being the run's directory"
_FILE = "the configuration file is the first word: mpisgd train job.toml"
_STALENESS = "the protocol bounds staleness: async by `protocol.most_staleness`, ssp by `protocol.slack`"
_LOOP = "for several runs, loop in the shell over mpisgd run or simulate, each with a different `out`, or over mpisgd submit"
_WARMUP = "the schedule has a warm-up: `schedule.warmup_epochs`, `schedule.warmup_updates` or `schedule.warmup_samples`"

_KWARGS = "arguments of torch's schedulers are given in a file, in the table schedule.kwargs"
_SCHEDULERS_OWN = (
    "anneal_strategy base_lr div_factor end_factor eta_min final_div_factor gamma max_lr milestones mode pct_start power"
    " start_factor step_size step_size_down step_size_up t_0 t_max t_mult three_phase total_iters total_steps"
)
"""Arguments of torch's schedulers that are no options of a schedule."""

_SAME: Mapping[str, str] = {
    _RATE: "lr learning_rate base_lr init_lr step_size eta alpha",
    _BATCH: "batch_size batchsize batch bs b train_batch_size per_device_train_batch_size micro_batch_size mini_batch_size"
    " minibatch_size global_batch_size local_batch_size",
    "evaluations take `evaluation.batch` samples at a time": "eval_batch_size test_batch_size per_device_eval_batch_size",
    _WORKERS: "workers num_workers nworkers",
    _RANKS: "world_size nproc nprocs np n ranks num_processes nproc_per_node learners num_learners lambda lambda_ nodes nnodes",
    "ranks are started again by mpisgd run -n RANKS --max-restarts N": "max_restarts restarts restart elastic max_retries",
    "own steps of learners between two pulls are `local_steps`, their rate `inner_alpha0`, their optimiser `inner_optimizer`": (
        "local_updates local_update_steps inner_steps inner_lr inner_learning_rate sync_every sync_period h diloco"
    ),
    "parameter servers are `shards`": "ps num_ps servers num_servers parameter_servers",
    _LENGTH: "num_epochs max_epochs n_epochs num_train_epochs steps max_steps num_steps iterations iters max_iter updates",
    _OUT: "output output_dir outdir save_dir log_dir logdir checkpoint_dir results_dir run_dir o default_root_dir save_path",
    "an existing run is replaced by `overwrite`": "force",
    _DEVICE: "gpus gpu cuda use_cuda num_gpus n_gpu accelerator devices no_cuda use_gpu",
    _MPI: "backend dist_backend dist_url master_addr master_port rank local_rank init_method hosts host rdzv_endpoint",
    _FLOAT: "fp16 bf16 amp mixed_precision half precision dtype compression fp16_allreduce",
    _MOMENTUM: "momentum nesterov",
    _DECAY: "weight_decay wd l2",
    _BETA: "beta1 beta2 betas",
    "parameters are grouped by their names: `groups.weight_decay`, `groups.rate`": (
        "param_groups parameter_groups no_decay no_weight_decay bias_lr head_lr"
    ),
    "training begins with the weights of a file by `init_from`": "pretrained init_weights initial_weights load_weights",
    _CLIP: "clip grad_clip clip_grad clip_grad_norm max_grad_norm gradient_clip_val",
    "`accumulation` mini-batches are one gradient": "gradient_accumulation_steps accumulate_grad_batches accumulation_steps",
    _CHECKPOINT: "save_every save_steps save_freq save_interval checkpoint_every checkpoint_interval",
    _EVALUATE: "eval_every eval_steps eval_interval eval_freq val_every val_interval val_check_interval",
    _TOLD: "log_interval log_every log_every_n_steps logging_steps print_freq verbose quiet v",
    "others' loggers are `loggers`: tensorboard, wandb (offline), mlflow": "wandb tensorboard mlflow report_to logger log_with",
    "nothing is sent anywhere: mpisgd report RUN and compare draw from the run's directory": "neptune comet project",
    "models have options of their own, `model.hidden` say; a model of yours has `model.kwargs`": (
        "dropout hidden_size num_layers depth width"
    ),
    "stop the job by Ctrl-C or SIGTERM: both save; then mpisgd run -n RANKS --resume RUN": "resize",
    _RESUME: "resume_from resume_from_checkpoint load restore ckpt ckpt_path",
    _FILE: "config cfg config_file f",
    "the data set is `data`, with files below `data_dir`": "dataset dataset_path data_path data_root root",
    "the network is `model`": "arch net model_name",
    "the optimiser is `optimizer`": "opt optim optimiser",
    "the loss is `loss`": "criterion loss_fn",
    "the learning rate's schedule is `schedule`": "scheduler lr_scheduler sched lr_schedule",
    _WARMUP: "warmup warmup_epochs warmup_steps warmup_ratio",
    _STALENESS: "staleness max_staleness staleness_bound bound stale",
    "how ranks are kept together is `protocol`": "sync async_mode mode strategy algorithm sync_mode distribution_strategy",
    "protocol backup has `protocol.b` backup learners": "backup_workers backups num_backup_workers",
    "all randomness comes from `seed`": "random_seed manual_seed",
    "torch's threads of each rank are `threads`": "num_threads omp_num_threads threads_per_rank cpus_per_task",
    "a GPU's deterministic kernels are `deterministic`": "cudnn_deterministic use_deterministic_algorithms",
    "averaged weights are kept by `averaging`, their decay": "ema ema_decay polyak swa",
    "a virtual cluster is another command: mpisgd simulate": "simulate virtual_learners",
    "--print-config prints the configuration and stops": "dry_run",
    _LOOP: "sweeps grid element",
    "most options of a run stand at the top of the file, in no table: epochs, mu, alpha0": "training trainer train hyper",
}
#: Name, in small letters with underscores -> explanation.
OPTIONS: Mapping[str, str] = {name: text for text, names in _SAME.items() for name in names.split()}

#: Removed key of a file -> its inert value, and its replacement.
REMOVED: Mapping[str, tuple[Any, str]] = {
    "sweep": ({}, _LOOP),
    "exchange": ("auto", "vectors travel as the program chooses; duplex is `ahead` 1, prefetch `ahead` 2, layerwise `per_layer`"),
    "receive": ("in-turn", "gradients are received as the program chooses"),
    "spares": (0, "a run goes on without a dead learner; mpisgd run --max-restarts begins again with all learners"),
    "log.max_bytes": (0, "`log.enabled` switches the log off; a push takes some 150 bytes of the log"),
}

_SUBMIT: Mapping[str, str] = {
    "give `learners`, or `nodes` and `tasks_per_node`: ranks = shards + learners (+ 1 evaluator)": (
        "ntasks n np ranks tasks workers num_workers world_size"
    ),
    "ranks on each node are `tasks_per_node`": "ntasks_per_node nproc_per_node ptile ppn ranks_per_node",
    "GPUs of each node are `gpus_per_node`": "gpus gres num_gpus gpu",
    "the time limit is `time`, hours:minutes or 90m": "walltime time_limit w t wall_time",
    "the queue or partition is `queue`": "p q",
    "the job's name is `name`": "job_name j",
    "cores of each rank are `threads`": "cpus_per_task cores c",
    "the script is printed by `dry_run`": "print script test_only preview",
    "the run's options stand in the configuration file, e.g. job.toml; the run's directory is results/<name>-<job id>": (
        "out output epochs mu alpha0 protocol lr batch_size"
    ),
    "removed; submit each remaining run once more": "resume",
}
#: As OPTIONS, for `mpisgd submit`.
SUBMIT: Mapping[str, str] = {name: text for text, names in _SUBMIT.items() for name in names.split()}

#: Removed options of `mpisgd plan`.
PLAN: Mapping[str, str] = {
    "group_size": "removed; choose `group_size` and `micro_batches` of a run by hand, and try both by mpisgd simulate",
}
#: Removed options of `mpisgd compare`.
COMPARE: Mapping[str, str] = {"sweep": "removed; give the runs' directories: mpisgd compare results/a results/b"}

_COMMANDS: Mapping[str, str] = {
    "mpisgd run -n RANKS job.toml": "fit start launch learn exec mpirun mpiexec",
    "mpisgd run -n RANKS --resume RUN": "resume continue restart",
    "mpisgd report RUN": "eval evaluate plot show visualize tensorboard log logs status figures",
    "mpisgd submit job.toml": "sbatch bsub qsub srun slurm lsf pbs flux queue",
    "mpisgd doctor": "check env info test diagnose",
    "mpisgd simulate job.toml": "sim virtual",
    "mpisgd bench": "benchmark speed time",
}

_BRING_MODEL = "bring your own: package.module:factory, e.g. torchvision.models:resnet18"
_BRING_DATA = "bring your own: package.module:factory, or any HDF5 file by the data set hdf5"

#: Component -> pattern of foreign names, however near to known names -> explanation.
_OTHERS: Mapping[str, Mapping[str, str]] = {
    "optimizer": {
        "(lion|asgd|nadam|radam|sparse_?adam|adamax|adadelta|adafactor)": "it is not here",
        "(lbfgs|l_bfgs|rprop|shampoo|muon|sgdw|ftrl)": "it is not here",
    },
    "protocol": {
        "(bsp|sync|synchronous|sync_sgd|ssgd)": "use hardsync",
        "(asp|asynchronous|asgd|async_sgd|hogwild)": "use async",
        "(ddp|horovod|ring|ring_allreduce|nccl|gloo|mpi)": "use allreduce",
        "(nsoftsync|n_softsync|1_softsync)": "use softsync, with protocol.n",
        "(dynsgd|staleness_aware)": "use softsync, with protocol.modulation",
        "(local_sgd|localsgd|diloco|fedavg)": "use local_steps with another protocol",
        "(easgd|fsdp|zero|gossip)": "it is not here",
    },
    "model": {
        "(resnet|vgg|vit|lenet|gpt|bert|mobilenet|densenet|efficientnet|inception|unet|googlenet)[a-z0-9_-]*": _BRING_MODEL,
        "(transformer|lstm|rnn|cnn)[a-z0-9_-]*": _BRING_MODEL,
        r".*\.(py|pt|pth|onnx)": _BRING_MODEL,
    },
    "data": {
        "(cifar100|cifar_100|imagenet|svhn|coco|stl10|emnist|kmnist|qmnist|wikitext|imagefolder)[a-z0-9_-]*": _BRING_DATA,
        r".*\.(csv|npz|npy|pt|pth|parquet|json|pkl)": _BRING_DATA,
        r".*\.(h5|hdf5)": "an HDF5 file is the data set hdf5, with data.path",
        r".*\.py": _BRING_DATA,
    },
    "schedule": {
        "cosine": "use CosineAnnealingLR, of torch",
        "cosine_[a-z_]*": "use CosineAnnealingLR or CosineAnnealingWarmRestarts, of torch",
        "(onecycle|one_cycle)[a-z_]*": "use OneCycleLR, of torch",
        "(poly|polynomial)[a-z_]*": "use PolynomialLR, of torch",
        "(cyclic|triangular)[a-z_]*": "use CyclicLR, of torch",
        "warm_?up": "all schedules have schedule.warmup_epochs, schedule.warmup_updates, schedule.warmup_samples",
        "(lambda|multiplicative|inverse_?sqrt|noam)[a-z_]*": "bring your own function: package.module:function",
        "(reducelronplateau|reduce_lr_on_plateau|plateau)": "shards see no metric, and wait for no metric",
        "(sequentiallr|chainedscheduler|swalr)": "the scheduler takes objects; bring your own function: package.module:function",
    },
}


def option(name: str, *, table: Mapping[str, str] = OPTIONS, file: bool = False) -> str:
    """Explain an unknown option or (`file`) key, like `optimizer.lr`; "" if unknown everywhere."""
    plain = name.lstrip("-").lower().replace("-", "_")
    component, _, own = plain.rpartition(".")
    text = table.get(own, "") if component in ("", "optimizer", "schedule") else ""
    if component == "schedule" and own in _SCHEDULERS_OWN.split():
        text = _KWARGS
    if table is OPTIONS and plain in REMOVED:
        text = f"removed; {REMOVED[plain][1]}"
    return text.replace("`", "") if file else re.sub(r"`([\w.]+)`", lambda found: f"--{found[1].replace('_', '-')}", text)


def does_nothing(key: str, value: Any) -> bool:
    """Return whether a removed key has its inert value, as old runs have."""
    return key in REMOVED and bool(REMOVED[key][0] == value)


def foreign(words: Iterable[str], known: Collection[str], table: Mapping[str, str] = OPTIONS) -> tuple[str, str] | None:
    """Return the first foreign option and its explanation; `known`: our names."""
    for word in words:
        name = word.partition("=")[0]
        if re.fullmatch(r"--?[A-Za-z][\w.-]*", name) and _ours(name) not in known:
            text = option(name, table=table)
            if text:
                return name, text
    return None


def refuse_foreign(words: Iterable[str], known: Collection[str], table: Mapping[str, str] = OPTIONS) -> None:
    """Raise ConfigError at the first option of another framework, or of an earlier mpisgd; `known`: our names."""
    if (found := foreign(words, known, table)) is not None:
        raise ConfigError(f"unknown option {found[0]}: {found[1]}")


def _ours(name: str) -> str:
    """Return an option's field: `--data.no-subtract-mean` is data.subtract_mean."""
    return re.sub(r"(^|\.)no_", r"\1", name.lstrip("-").replace("-", "_"))


def kind(component: str, name: str, kinds: Collection[str]) -> str:
    """Explain an unknown kind by our name or its absence; list all kinds."""
    plain = name.lower().replace("-", "_")
    if found := next((known for known in kinds if known.lower() == plain), ""):
        return f"; did you mean {found!r}?"
    for pattern, text in _OTHERS.get(component, {}).items():
        if re.fullmatch(pattern, plain):
            return f": {text}; expected one of: {', '.join(sorted(kinds))}"
    return nearest(name, kinds) + (", or your own, package.module:factory" if "custom" in kinds else "")


def command(name: str) -> str:
    """Explain an unknown first word; "" if unknown everywhere."""
    if name.endswith(".toml"):
        return f"; did you mean: mpisgd train {name}"
    return next((f"; that is: {text}" for text, names in _COMMANDS.items() if name.lstrip("-") in names.split()), "")


def loss(name: str) -> str:
    """Return the function of a torch.nn class: `mse_loss` for `MSELoss`."""
    words = re.findall(r"[A-Z0-9]+(?![a-z])|[A-Z][a-z0-9]*", name)
    snake = "_".join(words).lower()
    return snake.removesuffix("_loss") if snake in ("cross_entropy_loss", "bce_loss", "bce_with_logits_loss") else snake
