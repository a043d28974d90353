"""What every process of the service needs: its log, its signals, its threads."""
