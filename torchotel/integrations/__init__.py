"""What training frameworks know of a step, heard through their own hooks where the program has imported them."""
