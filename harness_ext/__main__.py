"""`python -m harness_ext`: the command `harness-ext` where that is not on the PATH, as after `pip install --target`."""

import sys

from harness_ext.cli import main

sys.exit(main())
