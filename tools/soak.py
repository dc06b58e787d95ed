"""Kills and resumes are a test now."""

import sys

if __name__ == "__main__":
    sys.exit(print("tools/soak.py: error: it is a test now: bash tests/run.sh --long -k soak", file=sys.stderr) or 2)
