import os
import sys

from nicest.cli import main

try:
    main()
except SystemExit as end:
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        raise
    # A worker of torchrun leaves at once: a thread of torch's that lets go of its last tensors while Python tears
    # itself down may be unwound by force, which aborts a process whose work is done ("terminate called without ...").
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(end.code if isinstance(end.code, int) else int(end.code is not None))
