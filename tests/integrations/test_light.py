# SPDX-License-Identifier: Apache-2.0
"""Nobody pays for an integration that is not used."""

import subprocess
import sys


def test_the_room_itself_loads_nothing() -> None:
    heavy = ("torch", "transformers", "accelerate", "lightning", "torchao", "deepspeed", "torchtitan")
    script = f"import sys, trimtab, trimtab.integrations\nassert not set({heavy}) & set(sys.modules)"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


def test_the_controller_loads_no_integration() -> None:
    script = "import sys, trimtab\ntrimtab.Controller\nassert not [n for n in sys.modules if 'integrations.' in n]"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
