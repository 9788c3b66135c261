"""Reports: tables of runs, the trade-off figure, model cards."""
