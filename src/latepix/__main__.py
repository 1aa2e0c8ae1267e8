"""`python -m latepix` is the `latepix` command."""

import sys

from latepix.cli import main

sys.exit(main())
