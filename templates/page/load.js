// What is packed into the page: texts, compressed, in blocks of data that nothing evaluates.

/**
 * The text of a block.
 * @param {string} id
 * @returns {Promise<string>}
 */
export async function unpacked(id) {
  const letters = atob(document.getElementById(id)?.textContent ?? "");
  const bytes = Uint8Array.from(letters, (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).text();
}

/**
 * The document of the page.
 * @returns {Promise<PageDocument>}
 */
export async function loadDocument() {
  return JSON.parse(await unpacked("document"));
}
