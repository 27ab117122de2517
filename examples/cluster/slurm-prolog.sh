#!/bin/bash
# Prolog of slurmd (slurm.conf: Prolog=/etc/slurm/prolog.d/ringtune.sh, PrologFlags=Alloc), run as root on each node of a
# job before it starts. One node of each kind measures for a minute, once; on all others, and ever after, this takes
# some seconds. Slurm drains a node whose prolog fails, and a missing profile is no reason for that: it ends with 0.
set -uo pipefail

# slurmd gives a prolog neither PATH nor HOME. RINGTUNE_BIN is the folder of the virtual environment's programs.
export PATH="${RINGTUNE_BIN:-/opt/ringtune/bin}:/usr/local/bin:/usr/bin:/bin"
export XDG_CACHE_HOME="${XDG_CACHE_HOME:-/var/cache/ringtune}"
export RINGTUNE_STORE="${RINGTUNE_STORE:-/shared/ringtune}"
mkdir -p "$XDG_CACHE_HOME"

# Below PrologEpilogTimeout. What was measured until then is kept, and the next job goes on from there.
if ! timeout --signal=INT --kill-after=30 300 \
    ringtune probe --if-stale --effort quick 2>&1 | logger --tag ringtune; then
    logger --tag ringtune "no profile yet; the job runs on the heuristic"
fi
ringtune which --report 2>&1 | logger --tag ringtune
exit 0
