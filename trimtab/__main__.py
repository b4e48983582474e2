# SPDX-License-Identifier: Apache-2.0
"""`python -m trimtab VERB` equals `trimtab VERB`."""

from trimtab.cli.main import main

if __name__ == "__main__":
    main()
