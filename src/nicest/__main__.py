from nicest.cli import main

main()
