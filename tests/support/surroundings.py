"""What the shell of a run sets must not change what its tests find.

A newcomer's shell, a cluster's job and CI export different things. The tests set what they need themselves.
"""

from __future__ import annotations

import os
import signal
from typing import Any

# One thread, as in worker ranks: results of this process are compared with theirs bit for bit, and a sum in
# several threads has another order.
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")

# Prefixes of what a job, a cloud account, a terminal or a profile sets, and what we import reads. Settings of
# devices stay: where there is a GPU, they are those of the machine.
_FORGOTTEN = (
    "MEGACKPT_TRANSPORT",
    *("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_"),
    *("SLURM_", "OMPI_", "PMI_"),
    *("OMP_", "MKL_", "KMP_", "GOMP_"),
    *("AWS_", "GOOGLE_", "AZURE_", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"),
    *("HF_", "HUGGINGFACE_", "TRANSFORMERS_", "ACCELERATE_"),
    *("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR", "CLICOLOR", "TERM", "LC_", "LANG", "TZ"),
    *("PYTHONWARNINGS", "PYTHONOPTIMIZE", "PYTHONHASHSEED", "PYTHONIOENCODING", "PYTHONUTF8"),
)

_SIGNALS: dict[int, Any] = {
    signal.SIGINT: signal.default_int_handler,
    signal.SIGHUP: signal.SIG_DFL,
    signal.SIGTERM: signal.SIG_DFL,
}


def forget_surroundings() -> None:
    """Remove what the shell exports and tests could depend on, and give this process one thread.

    Signals that the shell ignores, as it does in a script's background, stop this process again.
    """
    for name in list(os.environ):
        if name.upper().startswith(_FORGOTTEN):
            del os.environ[name]
    os.environ.update(dict.fromkeys(_THREADS, "1"))
    for number, action in _SIGNALS.items():
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, action)
