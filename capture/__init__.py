"""Record one training iteration as a graph and replay it; `graphfsdp.capture` is its front door."""

if __name__ != "graphfsdp._capture":
    raise ImportError(
        f"this folder is the package graphfsdp._capture, but was imported as {__name__!r}; "
        "write `import graphfsdp` and run from outside the folder"
    )
