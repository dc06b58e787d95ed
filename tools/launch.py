"""Run torchrun, but end with one line that gives the reason of an expected error or signal, without its traceback.

    python tools/launch.py --nproc-per-node 2 pretrain_gpt_bcd.py --help

Takes torchrun's flags. The exit code is that of the first rank that failed, or 128 plus the signal's number.
"""

from __future__ import annotations

import logging
import os
import sys

from torch.distributed import run
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError


def main() -> int:
    """Run torchrun's agent; return the exit code."""
    logging.getLogger("torch.distributed.elastic.multiprocessing.api").setLevel(logging.CRITICAL)  # the line is enough
    # the run's summary says how many threads it has
    logging.getLogger("torch.distributed.run").addFilter(lambda record: "OMP_NUM_THREADS" not in record.msg)
    try:
        arguments = run.parse_args(sys.argv[1:])
        if not (arguments.module or arguments.no_python or os.path.isfile(arguments.training_script)):
            print(f"launch.py: error: {arguments.training_script}: there is no such file", file=sys.stderr)
            return 2
        run.run(arguments)
    except KeyboardInterrupt:  # before the agent has handlers
        return 130
    except SignalException as stopped:
        return 128 + stopped.sigval
    except ChildFailedError as failed:
        rank, failure = failed.get_first_failure()
        # the rank's own line (megatron.bcd.runtime.exit), or torchrun's report of a rank that crashed
        line = failure.message["message"] if isinstance(failure.message, dict) else failed
        if line is failed or rank != failure.local_rank:  # otherwise rank 0, which is on this node, has printed it
            print(line, file=sys.stderr, flush=True)
        return failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode
    return 0


if __name__ == "__main__":
    sys.exit(main())
