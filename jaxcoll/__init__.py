"""Fast, deterministic collectives for JAX, with errors instead of hangs."""

import importlib
from typing import TYPE_CHECKING, Any

from jaxcoll._lazy import is_launcher, load

if TYPE_CHECKING:
    from jaxcoll import models as models
    from jaxcoll import nnx as nnx
    from jaxcoll import optax as optax
    from jaxcoll._accelerate import accelerate_lax as accelerate_lax
    from jaxcoll._config import config as config
    from jaxcoll._config import using as using
    from jaxcoll._engine import reset as reset
    from jaxcoll._errors import CollectiveError as CollectiveError
    from jaxcoll._errors import NativeUnavailableError as NativeUnavailableError
    from jaxcoll._explain import Report as Report
    from jaxcoll._explain import explain as explain
    from jaxcoll._info import Info as Info
    from jaxcoll._info import info as info
    from jaxcoll._initialize import initialize as initialize
    from jaxcoll._processes import simulate_cpu_devices as simulate_cpu_devices
    from jaxcoll._watch import allow_pause as allow_pause
    from jaxcoll._watch import watch as watch
    from jaxcoll.collectives.all_gather import all_gather as all_gather
    from jaxcoll.collectives.all_gather_matmul import all_gather_matmul as all_gather_matmul
    from jaxcoll.collectives.all_reduce import all_reduce as all_reduce
    from jaxcoll.collectives.all_to_all import all_to_all as all_to_all
    from jaxcoll.collectives.broadcast import broadcast as broadcast
    from jaxcoll.collectives.matmul_reduce_scatter import (
        matmul_reduce_scatter as matmul_reduce_scatter,
    )
    from jaxcoll.collectives.ppermute import ppermute as ppermute
    from jaxcoll.collectives.reduce_scatter import reduce_scatter as reduce_scatter
    from jaxcoll.diagnosis.dumps import dump as dump
    from jaxcoll.diagnosis.errors import ErrorInfo as ErrorInfo
    from jaxcoll.diagnosis.errors import MismatchedCall as MismatchedCall
    from jaxcoll.diagnosis.errors import MissingRank as MissingRank
    from jaxcoll.diagnosis.errors import error_info as error_info
    from jaxcoll.diagnosis.trace import trace as trace
    from jaxcoll.mesh import DeviceMeshManager as DeviceMeshManager
    from jaxcoll.mesh import make_mesh as make_mesh
    from jaxcoll.nn.attention import TPAttention as TPAttention
    from jaxcoll.nn.cross_entropy import (
        vocab_parallel_cross_entropy as vocab_parallel_cross_entropy,
    )
    from jaxcoll.nn.dense import ColumnParallelDense as ColumnParallelDense
    from jaxcoll.nn.dense import RowParallelDense as RowParallelDense
    from jaxcoll.nn.dense import TPAsyncDense as TPAsyncDense
    from jaxcoll.nn.dense import TPDense as TPDense
    from jaxcoll.nn.dropout import TPDropout as TPDropout
    from jaxcoll.nn.embed import VocabParallelEmbed as VocabParallelEmbed
    from jaxcoll.nn.mlp import TPMLP as TPMLP
    from jaxcoll.nn.norms import TPLayerNorm as TPLayerNorm
    from jaxcoll.nn.norms import TPRMSNorm as TPRMSNorm
    from jaxcoll.nn.sharded_linear import ShardedLinear as ShardedLinear
    from jaxcoll.nn.stacked import stacked_layers as stacked_layers
    from jaxcoll.parallel.checkpoints import Checkpoints as Checkpoints
    from jaxcoll.parallel.clipping import clip_by_global_norm as clip_by_global_norm
    from jaxcoll.parallel.clipping import global_norm as global_norm
    from jaxcoll.parallel.data import DataParallel as DataParallel
    from jaxcoll.parallel.describe import describe as describe
    from jaxcoll.parallel.describe import draw as draw
    from jaxcoll.parallel.fsdp import gather_array_with_mean_grads as gather_array_with_mean_grads
    from jaxcoll.parallel.fsdp import gather_params as gather_params
    from jaxcoll.parallel.fsdp import shard_module_params as shard_module_params
    from jaxcoll.parallel.fsdp import shard_params as shard_params
    from jaxcoll.parallel.fsdp import sync_gradients as sync_gradients
    from jaxcoll.parallel.fully_shard import fully_shard as fully_shard
    from jaxcoll.parallel.layouts import export_stages as export_stages
    from jaxcoll.parallel.layouts import export_tp_dense as export_tp_dense
    from jaxcoll.parallel.layouts import import_stages as import_stages
    from jaxcoll.parallel.layouts import import_tp_dense as import_tp_dense
    from jaxcoll.parallel.metrics import DistributedMetrics as DistributedMetrics
    from jaxcoll.parallel.partitioned import with_partitioning as with_partitioning
    from jaxcoll.parallel.pipeline import pipeline as pipeline
    from jaxcoll.parallel.pipeline import (
        pipeline_parallel_train_step as pipeline_parallel_train_step,
    )
    from jaxcoll.parallel.pipeline import sequential as sequential
    from jaxcoll.parallel.pipelined import pipelined as pipelined
    from jaxcoll.parallel.placement import DevicePlacement as DevicePlacement
    from jaxcoll.parallel.plan import ParallelPlan as ParallelPlan
    from jaxcoll.parallel.precision import MixedPrecisionPolicy as MixedPrecisionPolicy
    from jaxcoll.parallel.reshard import reshard as reshard
    from jaxcoll.parallel.schedules import PipelineSchedule as PipelineSchedule
    from jaxcoll.parallel.stages import partition_layers as partition_layers
    from jaxcoll.parallel.state import TrainState as TrainState
    from jaxcoll.parallel.state import create_train_state as create_train_state
    from jaxcoll.parallel.step import data_parallel_train_step as data_parallel_train_step

# Public name -> module; loaded on first use, so that `import jaxcoll` costs next to nothing.
_HOMES = {
    "Checkpoints": "jaxcoll.parallel.checkpoints",
    "CollectiveError": "jaxcoll._errors",
    "ColumnParallelDense": "jaxcoll.nn.dense",
    "DataParallel": "jaxcoll.parallel.data",
    "DeviceMeshManager": "jaxcoll.mesh",
    "DevicePlacement": "jaxcoll.parallel.placement",
    "DistributedMetrics": "jaxcoll.parallel.metrics",
    "ErrorInfo": "jaxcoll.diagnosis.errors",
    "Info": "jaxcoll._info",
    "MismatchedCall": "jaxcoll.diagnosis.errors",
    "MissingRank": "jaxcoll.diagnosis.errors",
    "MixedPrecisionPolicy": "jaxcoll.parallel.precision",
    "NativeUnavailableError": "jaxcoll._errors",
    "ParallelPlan": "jaxcoll.parallel.plan",
    "PipelineSchedule": "jaxcoll.parallel.schedules",
    "Report": "jaxcoll._explain",
    "RowParallelDense": "jaxcoll.nn.dense",
    "ShardedLinear": "jaxcoll.nn.sharded_linear",
    "TPAsyncDense": "jaxcoll.nn.dense",
    "TPAttention": "jaxcoll.nn.attention",
    "TPDense": "jaxcoll.nn.dense",
    "TPDropout": "jaxcoll.nn.dropout",
    "TPLayerNorm": "jaxcoll.nn.norms",
    "TPMLP": "jaxcoll.nn.mlp",
    "TPRMSNorm": "jaxcoll.nn.norms",
    "TrainState": "jaxcoll.parallel.state",
    "VocabParallelEmbed": "jaxcoll.nn.embed",
    "accelerate_lax": "jaxcoll._accelerate",
    "all_gather": "jaxcoll.collectives.all_gather",
    "all_gather_matmul": "jaxcoll.collectives.all_gather_matmul",
    "all_reduce": "jaxcoll.collectives.all_reduce",
    "all_to_all": "jaxcoll.collectives.all_to_all",
    "allow_pause": "jaxcoll._watch",
    "broadcast": "jaxcoll.collectives.broadcast",
    "clip_by_global_norm": "jaxcoll.parallel.clipping",
    "config": "jaxcoll._config",
    "create_train_state": "jaxcoll.parallel.state",
    "data_parallel_train_step": "jaxcoll.parallel.step",
    "describe": "jaxcoll.parallel.describe",
    "draw": "jaxcoll.parallel.describe",
    "dump": "jaxcoll.diagnosis.dumps",
    "error_info": "jaxcoll.diagnosis.errors",
    "explain": "jaxcoll._explain",
    "export_stages": "jaxcoll.parallel.layouts",
    "export_tp_dense": "jaxcoll.parallel.layouts",
    "fully_shard": "jaxcoll.parallel.fully_shard",
    "gather_array_with_mean_grads": "jaxcoll.parallel.fsdp",
    "gather_params": "jaxcoll.parallel.fsdp",
    "global_norm": "jaxcoll.parallel.clipping",
    "import_stages": "jaxcoll.parallel.layouts",
    "import_tp_dense": "jaxcoll.parallel.layouts",
    "info": "jaxcoll._info",
    "initialize": "jaxcoll._initialize",
    "make_mesh": "jaxcoll.mesh",
    "matmul_reduce_scatter": "jaxcoll.collectives.matmul_reduce_scatter",
    "partition_layers": "jaxcoll.parallel.stages",
    "pipeline": "jaxcoll.parallel.pipeline",
    "pipeline_parallel_train_step": "jaxcoll.parallel.pipeline",
    "pipelined": "jaxcoll.parallel.pipelined",
    "ppermute": "jaxcoll.collectives.ppermute",
    "reduce_scatter": "jaxcoll.collectives.reduce_scatter",
    "reset": "jaxcoll._engine",
    "reshard": "jaxcoll.parallel.reshard",
    "sequential": "jaxcoll.parallel.pipeline",
    "shard_module_params": "jaxcoll.parallel.fsdp",
    "shard_params": "jaxcoll.parallel.fsdp",
    "simulate_cpu_devices": "jaxcoll._processes",
    "stacked_layers": "jaxcoll.nn.stacked",
    "sync_gradients": "jaxcoll.parallel.fsdp",
    "trace": "jaxcoll.diagnosis.trace",
    "using": "jaxcoll._config",
    "vocab_parallel_cross_entropy": "jaxcoll.nn.cross_entropy",
    "watch": "jaxcoll._watch",
    "with_partitioning": "jaxcoll.parallel.partitioned",
}

_MODULES = ("models", "nnx", "optax")

__all__ = [*_HOMES, *_MODULES, "__version__"]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        value = load(f"jaxcoll.{name}", _HOMES[name], name)
    elif name in _MODULES:
        value = importlib.import_module(f"jaxcoll.{name}")
    elif name == "__version__":
        from importlib.metadata import version

        value = version("jaxcoll")
    else:
        raise AttributeError(f"module 'jaxcoll' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


# Not lazily: it adds the backend to JAX's trace context, and every function that was traced before
# would be traced and compiled again. `jaxcoll run` traces nothing, and starts sooner without JAX.
if not is_launcher():
    _config = importlib.import_module("jaxcoll._config")
    if _config.accelerates_lax():  # by the environment
        importlib.import_module("jaxcoll._accelerate")
