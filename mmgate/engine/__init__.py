"""What stands between a command line and mmengine's Runner."""
