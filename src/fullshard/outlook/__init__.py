"""What a run will take: memory, time, and what to change. Pure, as the planner is."""
