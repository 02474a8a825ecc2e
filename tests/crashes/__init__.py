"""Power loss: what a workload did to its files, the disks that may be left, whether a store comes back from them."""
