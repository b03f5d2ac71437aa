"""A process that answers requests: `python -m kernels.serve`.

A request is a line of JSON, the name of a module and what its function `answer` takes; so is its answer. What else the
process prints goes to stderr.
"""

from __future__ import annotations

import json
import os
import sys
from importlib import import_module

import torch


def main() -> None:
    torch.set_num_threads(1)
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    if os.environ.get("TRITON_INTERPRET"):
        import_module("kernels.shortcuts").take()
    for line in sys.stdin:
        module, request = json.loads(line)
        print(json.dumps(import_module(module).answer(request)), file=answers, flush=True)


if __name__ == "__main__":
    main()
