"""`examples/train_lm.py`, of which one rank is killed once, or none; its last state is kept.

killed_train_lm.py RANK|- SCRIPT FOLDER OPTIONS...
"""

import atexit
import os
import runpy
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

killed, script, folder = sys.argv[1:4]
mine = os.environ["JAXCOLL_PROCESS_ID"]


def kill_after_a_checkpoint() -> None:
    # One that is not complete has a longer name.
    while not any(at.name.isdigit() for at in Path(folder, "checkpoints").glob("*")):
        time.sleep(0.005)
    os.kill(os.getpid(), signal.SIGKILL)


if os.environ["JAXCOLL_RESTART"] == "0" and mine == killed:
    threading.Thread(target=kill_after_a_checkpoint, daemon=True).start()
sys.argv = [script, f"--out={folder}", *sys.argv[4:]]
sys.path[0] = str(Path(script).parent)

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from support import data  # noqa: E402
from support.checkpoints import Checkpoints  # noqa: E402

random_windows = data.random_windows
drawn: set[int] = set()


def draw_and_note(text: Any, shape: Any, seed: Any, index: Any = slice(None)) -> Any:
    rows = index[0] if isinstance(index, tuple) else index
    drawn.update(range(shape[0])[rows])
    return random_windows(text, shape, seed, index)


save, restore = Checkpoints.save, Checkpoints.restore


def save_and_keep(self: Any, state: Any, *arguments: Any) -> None:
    save(self, state, *arguments)
    leaves = [
        jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf
        for leaf in jax.tree.leaves(state)
    ]
    shards = [np.asarray(s.data) for leaf in leaves for s in leaf.addressable_shards]
    np.savez(Path(folder, f"{mine}.npz"), *shards)


def restore_and_say(self: Any, step: int, **like: Any) -> Any:
    print(f"goes on after step {step}", flush=True)
    return restore(self, step, **like)


Checkpoints.save, Checkpoints.restore = save_and_keep, restore_and_say
data.random_windows = draw_and_note
atexit.register(lambda: print(f"drew windows {sorted(drawn)}", flush=True))
runpy.run_path(script, run_name="__main__")
