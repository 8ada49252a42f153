"""`python -m megackpt.cli`: the same as the command `megackpt`."""

import sys

from megackpt.cli.entry import main

sys.exit(main())
