"""What people look at: episodes as films."""
