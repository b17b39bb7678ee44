"""What every command of the command line prints, asks and interrupts alike."""
