"""What a sharded training run will need, before there is a GPU or a second rank."""
