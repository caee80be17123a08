"""The modules of benchmarks/ that tests of GPUs use."""

import importlib
import importlib.util
from typing import Any

from benchmark_modules import BENCHMARKS, importable

with importable():
    gpu_cases: Any = importlib.import_module("gpu_cases")
    gpu_jobs: Any = importlib.import_module("gpu_jobs")
    gpu_report: Any = importlib.import_module("gpu_report")
    gpu_step: Any = importlib.import_module("gpu_step")
    gpu_turns: Any = importlib.import_module("gpu_turns")
    raw_nccl: Any = importlib.import_module("raw_nccl")
    # Under another name than this folder's.
    _spec = importlib.util.spec_from_file_location("bench_gpu", BENCHMARKS / "gpu.py")
    assert _spec is not None
    assert _spec.loader is not None
    program: Any = importlib.util.module_from_spec(_spec)
    _spec.loader.exec_module(program)
