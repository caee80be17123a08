"""Prints where the devices of a mesh are: describing.py [hosts]."""

import os
import sys

import jax
from world import mesh, say

import jaxcoll
from jaxcoll.diagnosis import black_box, dumps

if "hosts" in sys.argv:  # pretends that each process is on a host of its own
    os.environ["JAXCOLL_HOST_ID"] = f"host{jax.process_index()}"
    jaxcoll.reset()
for line in jaxcoll.describe(mesh()).splitlines():
    say(line)
if "hosts" in sys.argv:  # the clocks are one, though nothing says so
    box = black_box.own()
    say(f"met at {dumps.contents(box)['clock']['met_ns'] if box else 0} ns")
