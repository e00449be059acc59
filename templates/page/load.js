/** Reads the document of the page: JSON, compressed, in a block of data that nothing evaluates. */

/**
 * The document of the page.
 * @returns {Promise<PageDocument>}
 */
export async function loadDocument() {
  const block = document.getElementById("document");
  if (block === null || block.textContent === null) {
    throw new Error("the page has no document");
  }
  const letters = atob(block.textContent);
  const bytes = new Uint8Array(letters.length);
  for (let place = 0; place < letters.length; place += 1) {
    bytes[place] = letters.charCodeAt(place);
  }
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).json();
}
