"""`python -m jaxcoll`: the command, where it is not on the PATH."""

import sys

from jaxcoll.cli import main

sys.exit(main())
