"""What anybody's training run will take, from what a table says of it: speed, memory, intervals."""
