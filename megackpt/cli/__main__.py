"""`python -m megackpt.cli`: the same as the command `megackpt`."""

import sys

from megackpt.cli.frame import main

sys.exit(main())
