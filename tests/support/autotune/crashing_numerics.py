"""A numerics worker whose kernels misbehave by head dimension: 16 kills it, 24 hangs, 32 loses the device."""

from __future__ import annotations

import json
import os
import signal
import sys
import time

for line in sys.stdin:
    job = json.loads(line)
    head_dim = job["shape"][0]
    print("a library that talks")
    for number, (name, backward) in enumerate(job["asked"]):
        print(json.dumps({"begin": number}), flush=True)
        if (head_dim, name, backward) == (16, "flash-cpu", True):
            print("so long", file=sys.stderr)
            os.kill(os.getpid(), signal.SIGSEGV)
        if (head_dim, name, backward) == (24, "flash-cpu", True):
            time.sleep(60)
        message = "CUDA error: misaligned address" if (head_dim, name) == (32, "flash-cpu") else ""
        figures = [] if message else [["dq", "0.001", "0.03"]]
        print(json.dumps({"end": number, "figures": figures, "message": message}), flush=True)
        if message:
            os._exit(1)
    print(json.dumps({"done": True}), flush=True)
