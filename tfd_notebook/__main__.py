"""``python -m tfd_notebook`` is ``tfd``."""

import sys

from tfd_notebook.cli import main

sys.exit(main())
