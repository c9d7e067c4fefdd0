"""What watches users and ranks for what would train on without a word though it is wrong."""
