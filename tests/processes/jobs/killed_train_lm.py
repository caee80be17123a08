"""`examples/train_lm.py`, of which rank 1 is killed once.

killed_train_lm.py SCRIPT FOLDER OPTIONS...
"""

import os
import runpy
import signal
import sys
import threading
import time
from pathlib import Path

script, folder = sys.argv[1:3]


def kill_after_a_checkpoint() -> None:
    while not list(Path(folder, "checkpoints").glob("[0-9]*")):
        time.sleep(0.005)
    os.kill(os.getpid(), signal.SIGKILL)


if os.environ["JAXCOLL_RESTART"] == "0" and os.environ["JAXCOLL_PROCESS_ID"] == "1":
    threading.Thread(target=kill_after_a_checkpoint, daemon=True).start()
sys.argv = [script, f"--out={folder}", *sys.argv[3:]]
sys.path[0] = str(Path(script).parent)
runpy.run_path(script, run_name="__main__")
