"""The benchmark behind ``graphfsdp bench``: workloads, contenders, measurements, reports."""
