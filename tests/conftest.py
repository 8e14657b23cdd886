"""One thread per test process: several processes with several OpenMP threads each would wait for one another."""

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported, and for the processes that tests start
