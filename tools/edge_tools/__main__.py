"""Run the command line as `python -m edge_tools`, wherever scripts are installed."""

from edge_tools.cli import main

if __name__ == "__main__":
    main()
