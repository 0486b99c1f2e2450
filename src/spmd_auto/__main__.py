"""`python -m spmd_auto`."""

import sys

from spmd_auto.cli import main

sys.exit(main())
