# SPDX-License-Identifier: Apache-2.0
"""What a pretrained, fine-tuned or quantized model can do: tasks from local files, and arms compared item by item.

    tasks.py      the files, read into items: what a model is asked
    arm.py        a model as it is to be asked: adapter, recipe, bits
    own.py        its answers by plain batched forwards: torch and transformers
    harness.py    the same answers from lm-eval, where it is installed
    measures.py   answers into columns and figures
    compare.py    two results over the same items: paired differences with bootstrap intervals
    results.py    all of it for one model, into a results file that can be resumed and compared

The two engines are asked the same strings and must agree. Ours is the default: it needs no lm-eval, which is large and
not on every machine, and it says how far it is.

    results = evaluate_model("smollm2", ["gsm8k", "piqa"], "data", out="plain.json")
    other = evaluate_model("smollm2", ["gsm8k", "piqa"], "data", recipe="int8")
    for difference in compare(other, results): print(difference.task, difference.verdict)
"""

from trimtab.lab.downstream.compare import Difference, compare
from trimtab.lab.downstream.results import evaluate_model, read_results

__all__ = ["Difference", "compare", "evaluate_model", "read_results"]
