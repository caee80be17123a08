"""Products of three axes across processes: the parameters of training on one device."""

import jax
from compared import check_plan
from world import say


def main() -> None:
    jax.config.update("jax_enable_x64", True)
    check_plan("linen", {"data": 2, "fsdp": 2, "tensor": 2})
    pipe = {"schedule": "interleaved", "num_micro_batches": 3}
    check_plan("linen", {"pipe": 2, "data": 2, "tensor": 2}, **pipe)
    say("all triples are right")


main()
