"""Where pictures come from and how a batch of them becomes two batches of views."""
