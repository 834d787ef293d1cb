// Tests the parsing of HTTP responses and URLs. Without libcurl, this file has no tests.
#if __has_include(<curl/curl.h>)

#include <arpa/inet.h>
#include <gmock/gmock.h>

#include "loadstone/error.h"
#include "storage/remote/backoff.h"
#include "storage/remote/blocks.h"
#include "storage/remote/http_client.h"
#include "storage/remote/http_response.h"
#include "storage/remote/listing.h"
#include "storage/remote/no_proxy.h"
#include "storage/remote/private_address.h"

namespace loadstone {

namespace {

TEST(HttpResponse, ContentRange) {
  const auto range = parse_content_range("bytes 5-9/100");
  ASSERT_TRUE(range);
  EXPECT_EQ(range->begin, 5u);
  EXPECT_EQ(range->end, 10u);
  EXPECT_EQ(range->total, 100u);
  EXPECT_EQ(parse_content_range("bytes 5-9/*")->total, std::nullopt);
  EXPECT_EQ(parse_content_range("bytes */7")->begin, std::nullopt);
  for (const char* wrong : {"", "bytes", "bytes 9-5/100", "bytes 5-/9", "items 0-1/2", "bytes 0-1",
                            "bytes 0-18446744073709551615/5", "bytes -1-2/3"}) {
    EXPECT_FALSE(parse_content_range(wrong)) << wrong;
  }
}

TEST(Listing, APageOfABucket) {
  std::vector<std::string> names;
  const std::string page =
      "<?xml version='1.0'?><ListBucketResult xmlns='x'><Contents><Key>a/x&amp;&#233;.bin</Key>"
      "</Contents><Contents><Key>a/</Key></Contents><Contents><Key>b/y</Key></Contents>"
      "<Contents><Key>a/../c</Key></Contents>";
  EXPECT_EQ(take_s3_page(page + "<IsTruncated>false</IsTruncated>", "a/", "s3://b/a/", names), "");
  EXPECT_EQ(names, std::vector<std::string>{"x&\u00e9.bin"});
  const std::string more = page + "<IsTruncated>true</IsTruncated>";
  EXPECT_EQ(
      take_s3_page(more + "<NextContinuationToken>t&lt;</NextContinuationToken>", "a/", "p", names),
      "t<");
  const std::string no_key = "<ListBucketResult><Contents><Key>a&bad;</Key></Contents>";
  for (const std::string& wrong : {std::string("<html>"), more, no_key}) {
    EXPECT_THROW(static_cast<void>(take_s3_page(wrong, "a/", "p", names)), Error) << wrong;
  }
}

TEST(Listing, TheNextOfSeveralLinks) {
  EXPECT_EQ(next_link("<https://h/a>; rel=\"prev\", </b?c=1>; rel=\"next\""), "/b?c=1");
  for (const char* none : {"", "<", "<a", "<a>; rel=\"prev\"", "rel=\"next\""}) {
    EXPECT_EQ(next_link(none), "") << none;
  }
}

TEST(Blocks, FewAreKeptHoweverManyFilesThereAre) {
  Blocks blocks;
  std::vector<int> files(200);
  for (int& file : files) blocks.keep(&file, std::make_shared<const Block>());
  std::size_t kept = 0;
  for (int& file : files) kept += blocks.find(&file) ? 1 : 0;
  EXPECT_EQ(kept, Blocks::count_max);
  blocks.forget(&files.back());
  EXPECT_EQ(blocks.find(&files.back()), nullptr);
}

TEST(HttpResponse, LinesOfALaterResponseForgetTheEarlierOnes) {
  HttpResponse response;
  for (const char* line : {"HTTP/1.1 100 Continue\r\n", "ETag: \"old\"\r\n", "\r\n",
                           "HTTP/2 206\r\n", "content-length: 12\r\n", "Retry-After: 3\r\n",
                           "Last-Modified: Mon\r\n", "X-Other: a: b\r\n", "nonsense\r\n"}) {
    response.take_line(line);
  }
  EXPECT_EQ(response.status, 206);
  EXPECT_EQ(response.content_length, 12u);
  EXPECT_EQ(response.retry_after_seconds, 3u);
  EXPECT_EQ(response.version(), "Mon");
}

TEST(Backoff, GrowsAndEnds) {
  Backoff backoff(100, 4);
  for (const int most : {100, 200, 400}) {
    const auto wait = backoff.next({});
    ASSERT_TRUE(wait);
    EXPECT_LE(wait->count(), most);
    EXPECT_GE(wait->count(), most / 2);
  }
  EXPECT_FALSE(backoff.next({}));
  backoff.progressed();
  EXPECT_EQ(backoff.next(2), std::chrono::milliseconds(2000));
  EXPECT_FALSE(backoff.next(3600));
}

TEST(PrivateAddress, Networks) {
  for (const char* address : {"127.0.0.1",
                              "10.1.2.3",
                              "172.16.0.1",
                              "172.31.255.255",
                              "192.168.1.1",
                              "169.254.169.254",
                              "100.64.0.1",
                              "0.0.0.0",
                              "224.0.0.1",
                              "::1",
                              "::",
                              "fe80::1",
                              "fd00::1",
                              "::ffff:10.0.0.1",
                              "ff02::1",
                              "fec0::1",
                              "64:ff9b::7f00:1",
                              "64:ff9b::10.0.0.1",
                              "64:ff9b:1::8.8.8.8",
                              "2002:7f00:1::",
                              "2002:a9fe:a9fe::1",
                              "::127.0.0.1",
                              "::ffff:0:192.168.0.1"}) {
    EXPECT_EQ(is_private_address(std::string(address)), true) << address;
  }
  for (const char* address :
       {"8.8.8.8", "172.32.0.1", "192.169.0.1", "2606:4700::1111", "::ffff:8.8.8.8",
        "64:ff9b::8.8.8.8", "64:ff9b:2::10.0.0.1", "2002:808:808::1", "2001:db8::7f00:1"}) {
    EXPECT_EQ(is_private_address(std::string(address)), false) << address;
  }
  EXPECT_EQ(is_private_address(std::string("no address")), std::nullopt);
}

TEST(NoProxy, NamesDomainsAddressesAndNetworks) {
  const char* const list = "example.org, .corp.,10.0.0.0/8 127.0.0.1,[::1],fd00::/8,1.2.3.4/40";
  for (const char* host : {"example.org", "EXAMPLE.org.", "a.example.org", "corp", "x.y.corp",
                           "10.255.0.1", "127.0.0.1", "[::1]", "[fd12::1]"}) {
    EXPECT_TRUE(is_without_proxy(host, list)) << host;
  }
  for (const char* host : {"", "badexample.org", "example.org.evil", "org", "11.0.0.1", "127.0.0.2",
                           "[::2]", "1.2.3.4", "10.example"}) {
    EXPECT_FALSE(is_without_proxy(host, list)) << host;
  }
  EXPECT_TRUE(is_without_proxy("any", "a,*"));
  EXPECT_FALSE(is_without_proxy("any", ""));
  EXPECT_FALSE(is_without_proxy("any", ",. ,"));
}

TEST(HttpClient, OriginsAndRedirects) {
  EXPECT_EQ(origin_of("https://h/x?y"), "https://h:443");
  EXPECT_EQ(origin_of("https://h:443/"), origin_of("https://h/z"));
  EXPECT_NE(origin_of("http://h/"), origin_of("https://h/"));
  EXPECT_EQ(redirected_url("https://h/a/b?s", "../c"), "https://h/c");
  EXPECT_EQ(redirected_url("https://h/a", "//other/x"), "https://other/x");
  EXPECT_EQ(redirected_url("https://h/a", "file:///etc/passwd"), "file:///etc/passwd");
}

}  // namespace

}  // namespace loadstone

#endif
