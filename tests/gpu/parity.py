"""Tensor-parallel and fully sharded training on all devices of a job, against one device.

In float64, with SGD, compared leaf by leaf; the models and the comparison are those of
tests/processes/jobs.
"""

from typing import Any

import jax
from processes.jobs.compared import PLAIN, check

import jaxcoll
from jaxcoll import fully_shard
from jaxcoll.models import TPClassifier


def train_alike(devices: Any) -> list[str]:
    """Trains over these devices; returns what was compared."""
    done = []

    def compare(what: str, model: Any, mesh: Any) -> None:
        check(model, mesh, what)
        done.append(what)

    count = len(devices)
    with jax.enable_x64(True), jaxcoll.using(backend="native"):
        split = jaxcoll.make_mesh({"data": count}, devices=devices)
        compare("data parallel", PLAIN, split)
        for stage in (1, 2, 3):
            model = fully_shard(PLAIN, "data", stage=stage, min_weight_size=16, bucket_bytes=1)
            compare(f"fully sharded, stage {stage}", model, split)
        tensor = jaxcoll.make_mesh({"data": 1, "tensor": count}, devices=devices)
        for overlap in (False, True):
            model = TPClassifier(num_classes=4, hidden=24, overlap=overlap, mesh=tensor)
            compare("tensor parallel" + ", in a ring" * overlap, model, tensor)
    return done
