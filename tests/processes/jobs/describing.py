"""Prints where the devices of a mesh are: describing.py [hosts]."""

import os
import sys

import jax
from world import mesh, say

import jaxcoll

if "hosts" in sys.argv:  # pretends that each process is on a host of its own
    os.environ["JAXCOLL_HOST_ID"] = f"host{jax.process_index()}"
    jaxcoll.reset()
for line in jaxcoll.describe(mesh()).splitlines():
    say(line)
