"""``python -m tfd_notebook`` is ``tfd``."""

import sys

from tfd_notebook.ui.cli import main

sys.exit(main())
